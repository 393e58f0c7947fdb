"""Which language people speak in a conversation: enough to choose a prompt, and to tell an answer in another one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from proxy.conversation import Message

SAMPLE = 20_000
"""Characters that are looked at: more make no difference."""

LEAST_WORDS = 4
"""Common words that must be found before a language in Latin letters is told."""

_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|https?://\S+|<[^>\n]{1,200}>", re.S)
_WORD = re.compile(r"[a-zà-öø-ÿœß]+(?:['’][a-zà-öø-ÿ]+)?", re.I)
_SCRIPTS = (
    ("ja", re.compile(r"[\u3040-\u30ff]"), 0.04),
    ("ko", re.compile(r"[\uac00-\ud7af\u1100-\u11ff]"), 0.1),
    ("zh", re.compile(r"[\u4e00-\u9fff]"), 0.08),
    ("ru", re.compile(r"[\u0400-\u04ff]"), 0.2),
    ("ar", re.compile(r"[\u0600-\u06ff]"), 0.2),
    ("hi", re.compile(r"[\u0900-\u097f]"), 0.2),
    ("el", re.compile(r"[\u0370-\u03ff]"), 0.3),
    ("he", re.compile(r"[\u0590-\u05ff]"), 0.2),
    ("th", re.compile(r"[\u0e00-\u0e7f]"), 0.2),
)
"""Language, its letters, and the share of all letters from which on it is spoken: names and code stand in Latin letters."""

_COMMON = {
    "en": "the and is are was of to in that this with for not you it be have has from which should when do does will we",
    "de": "der die das und ist sind war nicht mit für von zu den dem ein eine auf wird werden bitte ich wir soll wenn auch im",
    "fr": "le la les et est sont été ne pas avec pour dans que qui une des du au sur je nous il faut si ce cette doit",
    "es": "el los las y es son fue no con para en que una un del por se como más yo debe si esta este lo al hay",
    "pt": "o os as e é são foi não com para em que uma um do da dos por se como mais eu deve isto este ao na no você",
    "it": "il lo gli e è sono stato non con per in che una un del della si come più io deve questo questa al nel di",
    "nl": "de het een en is zijn was niet met voor van te dat die op wordt ik we moet als ook in aan bij",
}
_LANGUAGES_OF: dict[str, tuple[str, ...]] = {}
for _language, _words in _COMMON.items():
    for _word in _words.split():
        _LANGUAGES_OF[_word] = (*_LANGUAGES_OF.get(_word, ()), _language)


def detect(text: str) -> str | None:
    """The language of a text by its two letters; None when it cannot be told (little text, code, or a mixture)."""
    sample = _CODE.sub(" ", text[:SAMPLE])
    letters = sum(map(str.isalpha, sample))
    if letters < 8:
        return None
    for language, script, share in _SCRIPTS:
        if len(script.findall(sample)) >= share * letters:
            return language
    votes: Counter[str] = Counter()
    for word in _WORD.findall(sample.lower()):
        # a word that several languages have is a vote for none of them alone
        for language in _LANGUAGES_OF.get(word, ()):
            votes[language] += 1
    ranked = votes.most_common(2)
    if not ranked or ranked[0][1] < LEAST_WORDS:
        return None
    clear = len(ranked) == 1 or ranked[0][1] >= 1.5 * ranked[1][1]
    return ranked[0][0] if clear else None


def spoken(messages: Sequence[Message], task: str = "") -> str | None:
    """The language that the people of a conversation speak: the users, else the assistant. task: what the users wanted at first,
    where that is not among the messages; agents may then work for hundreds of steps without another word of theirs."""
    users, assistant = (
        "\n".join(message.text[:4000] for message in messages if message.role == role) for role in ("user", "assistant")
    )
    languages = (detect(text) for text in (users, f"{users}\n{task}", assistant))
    return next((language for language in languages if language is not None), None)
