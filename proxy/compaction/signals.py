"""What a line or a sentence is: an error, a request, a constraint, a conclusion.

Detectors for text in several languages. They look at one line or one message at a time and know nothing about conversations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from proxy.compaction.memo import Memo

REMEMBERED_CHARACTERS = 3_000_000
"""Text whose error lines are kept (a quarter of it for sentences): about four conversations of 200k tokens."""

LONGEST_ERROR_LINE = 400
"""Characters: longer lines are data (minified code, JSON) that happens to hold the word."""

# --- error lines ----------------------------------------------------------------------------------------------------

_STEMS = (
    "err", "excep", "fail", "fatal", "panic", "traceback", "abort", "denied", "refused", "not found", "no such", "cannot",
    "can't", "could not", "couldn't", "unable", "invalid", "exit", "returncode", "status", "timed out", "timeout", "crash",
    "fault", "undefined", "unresolved", "unexpected", "unknown", "unrecognized", "missing", "killed", "illegal", "conflict",
    "rejected", "core dumped", "not ok", "(eval)", "is not", "does not exist", "not a ", "overflow", "out of memory", "http",
    "✗", "✘", "✖", "×", "❌", "错误", "失败", "异常", "無効", "失敗", "エラー", "例外", "fehler", "fehlgeschlagen", "échou",
    "échec", "fallo", "falló", "excepción",
)  # fmt: skip
"""A line that holds none of these is no error line: found by plain search, so that most lines are never looked at."""

_ERROR = re.compile(
    r"""
      ^\s*(?:[\w./\\-]+(?:\[\d+\])?:\s+)?(?:\*{0,2}|\[)(?:fatal\s+)?(?:error|fatal|panic|failed|failure|fail|exception|
            critical|severe)\b[\]*]{0,3}\s*(?:\[[\w.-]+\]\s*)?(?::|!|-|–|—|\bin\b|\()
    | (?:^|[\s(\["'.])[\w.$]*(?:Error|Exception|Failure|Fault)(?:\[\w+\])?\s*(?:\([^)]*\))?\s*(?::|$)
    | ^\s*Traceback\ \(most\ recent\ call\ last\)
    | ^\s*(?:thread\ '.*'\ )?panicked\ at\b | \bthread\ '[^']*'\ panicked
    | ^\s*(?:-{2,3}\s+)?FAIL(?:ED)?\b(?:\s|:|$) | ^\s*not\ ok\s+\d+
    | \s(?:FAILED|ERROR)\s*(?:\[\s*\d+%\])?\s*$
    | ^E\s{2,}\S
    | ^\s*[✗✘✖×❌]\s*\S
    | \b(?:exit(?:ed)?|return(?:ed)?|finished|terminated)(?:\s+(?:with|status))?(?:\s+(?:non-?zero))?\s*[\s-]*(?:code|
          status)?\s*[:=]?\s*\(?(?:[1-9]\d{0,2}|-\d+)\)?\s*(?:$|[.,;)\]]|\()
    | ^\s*<?(?:exit_?code|returncode|exit[ _]status)>?\s*[:=>]\s*(?:[1-9]\d{0,2}|-\d+)
    | ^\s*(?:=+|-+)?\s*\d+\s+(?:tests?\s+|specs?\s+|examples?,\s+)?(?:failed|errors?|failures?)\b
    | \b[1-9]\d*\s+(?:failed|failing|failures?|errors?)\b(?:[,;.\s)=]|$)
    | \bTests?:?\s.*\b[1-9]\d*\s+failed
    | \bfail(?:ures|ed)=[1-9] | \berrors=[1-9]
    | :\s*(?:No\ such\ file\ or\ directory|Permission\ denied|command\ not\ found|not\ found|Is\ a\ directory|
          Not\ a\ directory|Input/output\ error|Connection\ refused|Operation\ not\ permitted|cannot\ [a-z]+.*)\s*$
    | ^\s*(?:bash|sh|zsh|npm|git|make|cargo|go|curl|docker|pip|node|python3?|grep|find|ls|cat|sed|cp|mv|rm|cd|mkdir|cmake|
          gcc|clang|ld|javac|mvn|gradle|yarn|pnpm|tsc|eslint):\s.*\b(?:error|fail|cannot|not|no\ |invalid|denied|refused|
          unknown|missing|illegal|unrecognized)
    | ^\s*(?:npm\s+(?:ERR!|error)|error\[E\d+\]|ERR!|make(?:\[\d+\])?:\s+\*\*\*)
    | ^[^\s:][^:\n]*:\d+(?::\d+)?:?\s+(?:-\s+)?(?:fatal\s+)?(?:error|undefined|cannot|expected)\b
    | \(\d+,\d+\):\s+error\b | \berror\s+(?:TS|CS|C|LNK|MSB|E)\d{3,5}\b
    | \b(?:Segmentation\ fault|core\ dumped|Bus\ error|Killed|Aborted|stack\ overflow|out\ of\ memory|Assertion\s+.*failed)\b
    | ^\s*(?:Command|Request|Operation|Connection|Process|The\ command)\b.{0,60}\b(?:timed\ out|failed|refused|aborted|
          was\ killed)
    | ^\s*(?:Cannot|Could\ not|Couldn't|Can't|Unable\ to|Failed\ to|Invalid|Unexpected|Unknown|Unrecognized|Missing)\s+\w
    | \b(?:command\ not\ found|no\ such\ file\ or\ directory|permission\ denied|not\ a\ git\ repository):\s*\S
    | ^\(eval\):\d+:\s | \[Errno\ \d+\] | \bdue\ to\ (?:an?\ )?(?:exception|error)\b
    | \bCONFLICT\s+\( | ^\s*Automatic\ merge\ failed | ^\s*!\s+\[(?:rejected|remote\ rejected)\]
    | \bHTTP(?:/\d(?:\.\d)?)?\s+[45]\d\d\b | \bstatus(?:\s+code)?:?\s+[45]\d\d\b
    | (?:错误|失败|异常)\s*(?:[:：!！。]|$) | ^\s*(?:错误|失败|异常|エラー|例外|無効)
    | (?:エラー|失敗|例外)(?:が|し|です|:|：|$)
    | ^\s*(?:Fehler|Erreur|Échec|Error|Fallo|Excepción)\b\s*(?::|\bbeim\b|\blors\b|\bal\b)
    | \b(?:fehlgeschlagen|a\ échoué|ha\ fallado|falló)\b
    """,
    re.X,
)
_ERROR_LOWER = re.compile(
    r"""
      ^\s*(?:\w+\s*:\s+)?(?:error|fatal|panic|failed|failure)\b\s*[:!\]-]
    | [\])|:\s](?:error|fatal|panic)\s*:\s
    | ["']?(?:error|errors|error_message|errormessage)["']?\s*:\s*["'\[{](?!["'\]}])
    | \s(?:ERROR|FATAL|CRITICAL|PANIC)\s
    | (?:no\ such\ file|permission\ denied|command\ not\ found|connection\ refused|does\ not\ exist|timed\ out)\b[.)]?\s*$
    | \bis\ not\ (?:recognized\ as|a\ valid|defined|installed|a\ function)\b
    | ^\s*exit(?:ed)?\ (?:code|status)\W+[1-9]
    """,
    re.X | re.I,
)

_NUMBERED = re.compile(r"^\s*\d+\s*(?:→|\||│|\t|:\s|:\t)|^\s*\d+:")
_SUMMARY_OR_LOCATED = re.compile(r"^\s*\d+ +(?:failed|errors?|passed)\b")
_LISTED = re.compile(r"^[dlbcps-](?:[r-][w-][xsStT-]){3}")
_DIFF = re.compile(r"^(?:[+-](?![+-]{2}\s)|@@|\+\+\+ |--- [ab]/|diff --git|index [0-9a-f]{7})")
_CODE = re.compile(
    r"""
      ^\s*(?://|\#(?!\#*\s*(?:ERROR|FAIL))|/\*|\*\s|<!--|"{3}|'{3}|--\s)
    | ^\s*(?:return|raise|throw|throws|func|fn|def|class|import|from|if|elif|else|for|while|case|switch|except|catch|try|
          finally|with|async|await|
        const|let|var|public|private|protected|static|export|interface|type|enum|struct|impl|use|package|pub|assert|yield|
              lambda|except|rescue|defer|
        print|println|printf|echo|expect|describe|it|test|self|this|console|logger|logging|log|fmt|errors|t|sys|process|
              std|new|set|end|begin|do|unless|when)
        (?=\s*[\s.(\[{:;]\s*\S*.*(?:[(){}\[\];=]|:\s*$))
    | ^\s*(?:return|raise|throw|import|from|def|class|func|fn|except|catch|elif|const|let|var|export)\b
    | ^\s*[\w.$\[\]"'*&]+\s*(?::=|\+=|-=|=>|->|==|!=|=(?!=))\s*\S
    | [{;,(]\s*$ | ^\s*[)}\]]
    | =>\s | \)\s*\{ | &&\s | \|\|\s
    """,
    re.X,
)
_RUNNER_ASSIGNMENT = re.compile(r"\b(?:failures|errors|failed|exit_?code|returncode|status|code)\s*=\s*-?[1-9]", re.I)
_PROSE = re.compile(r"^\s*(?:[-*•]|\d+\.)\s+\S.*\s\S|^\s*#{1,6}\s|^\s*\|.*\|\s*$")
_STRONG = re.compile(
    r"^\s*(?:E\s{2,}|Traceback|[\w.]*(?:Error|Exception)\b[^=({]*:\s|npm\s+ERR|error(?:\[E\d+\])?:\s|FAILED\s|FAIL\b|fatal:\s|[✗✘✖×❌]|panic:|---\s+FAIL)"
)
_ZERO = re.compile(
    r"\b(?:0|no)\s+(?:errors?|failures?|failed|failing|warnings?|issues?)\b|\bexit(?:ed)?(?:\s+with)?\s+(?:code|status)?:?\s*0\b",
    re.I,
)
_POSITIVE_COUNT = re.compile(r"\b[1-9]\d*\s+(?:failed|failing|failures?|errors?)\b", re.I)


def is_error_line(line: str) -> bool:
    """True for a line of output that reports a failure: not code that handles one, not a numbered read, not a diff's context."""
    if len(line) > LONGEST_ERROR_LINE:
        return False
    lowered = line.lower()
    return any(stem in lowered for stem in _STEMS) and _reports_failure(line)


@lru_cache(maxsize=16384)
def _reports_failure(line: str) -> bool:
    if len(line.strip()) < 6:
        return False
    if (_NUMBERED.search(line) and not _SUMMARY_OR_LOCATED.search(line)) or _DIFF.search(line) or _LISTED.match(line):
        return False
    if _ERROR.search(line) is None and _ERROR_LOWER.search(line) is None:
        return False
    if _ZERO.search(line) and not _POSITIVE_COUNT.search(line):
        return False
    if _STRONG.search(line):
        return True
    if _CODE.search(line) and not _RUNNER_ASSIGNMENT.search(line):
        return False
    return _PROSE.search(line) is None


def error_lines(text: str) -> tuple[str, ...]:
    """The error lines of a tool's output, in order, stripped at the right."""
    return _known_error_lines(text)


def _error_lines(text: str) -> tuple[str, ...]:
    lowered = text.lower()
    suspects = _lines_with(lowered, _STEMS)
    if not suspects:
        return ()
    lines = text.split("\n")
    if lowered.count("\n") != len(lines) - 1:
        suspects = list(range(len(lines)))
    return tuple(
        lines[number].rstrip()
        for number in suspects
        if len(lines[number]) <= LONGEST_ERROR_LINE and _reports_failure(lines[number])
    )


_known_error_lines = Memo(_error_lines, REMEMBERED_CHARACTERS)


def _lines_with(text: str, stems: Sequence[str]) -> list[int]:
    """Numbers of the lines that hold any of the stems."""
    starts: set[int] = set()
    for stem in stems:
        at = text.find(stem)
        while at >= 0:
            starts.add(text.rfind("\n", 0, at) + 1)
            stop = text.find("\n", at)
            at = text.find(stem, stop) if stop >= 0 else -1
    found = []
    number = position = 0
    for start in sorted(starts):
        number += text.count("\n", position, start)
        position = start
        found.append(number)
    return found


# --- sentences ------------------------------------------------------------------------------------------------------

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.S)
_SENTENCE_END = re.compile(r"(?<=[.?!…])[\"')\]]?\s+(?=\S)|(?<=[。！？])")
_LINE_DRESS = " \t\r-*•>#|"
LONGEST_SENTENCE = 600
"""Characters: what is longer is a paste; a quote of it is cut by whoever quotes."""


def sentences(text: str) -> tuple[str, ...]:
    """Sentences of prose in order; fenced code is left out, list and heading marks are taken off."""
    return _known_sentences(text)


def _sentences(text: str) -> tuple[str, ...]:
    if "```" in text:
        text = _FENCE.sub("\n", text)
    found: list[str] = []
    for line in text.split("\n"):
        bare = line.strip(_LINE_DRESS)
        if not bare:
            continue
        found.extend(piece.strip(_LINE_DRESS) for piece in _SENTENCE_END.split(bare))
    return tuple(sentence for sentence in found if len(sentence) > 1)


_known_sentences = Memo(_sentences, REMEMBERED_CHARACTERS // 4)


_REQUEST = re.compile(
    r"""
      \?\s*$ | ？
    | ^(?:please|pls|can|could|would|will|let'?s|let\ us|now|next|then|also|and|ok(?:ay)?[,.]?|yes[,.]?|no[,.]?|instead|
          first|finally|try|make\ sure|we|i|you|the\ task|your\ (?:task|goal|job))?\W*\s*
      (?:please\s+|just\s+|also\s+|then\s+|now\s+|to\s+|you\s+|we\s+|i\s+)*
      (?:add|adjust|address|allow|analy[sz]e|answer|apply|ask|book|build|calculate|cancel|change|check|clean|close|commit|
            compare|complete|configure|continue|convert|copy|create|
        debug|delete|deploy|describe|design|disable|do|document|drop|edit|enable|exchange|explain|extend|extract|fetch|
              figure|fill|filter|find|finish|fix|format|generate|get|give|go|handle|help|
        implement|improve|include|inspect|install|integrate|investigate|keep|list|load|look|make|merge|migrate|modify|
              move|open|optimi[sz]e|output|parse|plan|port|print|process|produce|provide|push|put|
        read|rebuild|recommend|redo|refactor|refund|remove|rename|reorder|replace|report|reproduce|resolve|restore|return|
              revert|review|rewrite|run|save|search|send|set|show|simplify|solve|sort|split|start|stop|suggest|summari[sz]e|
        support|switch|take|tell|test|translate|try|turn|undo|update|upgrade|use|validate|verify|view|wait|want|need|write)\b
    | \b(?:i(?:'d|\ would)\ like|i\ (?:want|need|wish)|can\ you|could\ you|would\ you|will\ you|help\ me|your\ (?:task|
          goal)\ is|we\ (?:need|want|should|still\ need))\b
    | ^(?:请|麻烦|帮|帮我|给我|我想|我要|我需要|能不能|可以|可否|希望|想要|把|将)|(?:请|帮我|麻烦你?|我想要?|我需要)\S|
          吗[？?]?$|呢[？?]?$
    | (?:ください|下さい|お願い|してほしい|して欲しい|たい(?:です|と)|でしょうか|ますか|ですか|てくれ|なさい|せよ)
    | \b(?:bitte|kannst\ du|können\ sie|könntest|ich\ (?:möchte|will|brauche|hätte\ gern)|füge|erstelle|ändere|prüfe|
          zeige|behebe|schreibe)\b
    | \b(?:s'il\ (?:te|vous)\ pla[iî]t|peux-tu|pouvez-vous|pourrais-tu|pourriez-vous|je\ (?:veux|voudrais|souhaite)|
          ajoute[rz]?|corrige[rz]?|crée[rz]?|montre[rz]?|vérifie[rz]?|écris|écrivez)\b
    | \b(?:por\ favor|puedes|podrías|podría|quiero|quisiera|necesito|me\ gustaría|añade|agrega|crea|corrige|muestra|
          comprueba|escribe)\b
    """,
    re.X | re.I,
)

_CONSTRAINT = re.compile(
    r"""
      \b(?:do\s+not|don'?t|never|must\s+not|mustn'?t|must|should\s+not|shouldn'?t|cannot\s+be|may\s+not|not\s+allowed|
            forbidden|prohibited|avoid|without\s+(?:changing|modifying|using|breaking|adding|touching)|refrain|no\s+longer|
        always|from\s+now\s+on|going\s+forward|in\s+future|henceforth|at\s+all\s+times|every\s+time|each\s+time|
              make\s+sure|ensure|be\s+sure\s+to|required?|is\s+mandatory|have\s+to|has\s+to|needs?\s+to\s+be|
        only\s+(?:use|change|edit|modify|touch|when|if|after|the)|exactly|at\s+(?:most|least)|no\s+more\s+than|
              limit(?:ed)?\s+to|stick\s+(?:to|with)|keep\s+(?:it|the|all|to)|leave\s+.{1,40}\s+(?:alone|as|unchanged|
              untouched)|
        prefer|rather\s+than|instead\s+of|i(?:'d|\s+would)\s+(?:rather|prefer)|we\s+use|use\s+only|remember)\b
    | 不要|不能|不可|不得|不许|别(?!人|的|处|名)|禁止|避免|切勿|必须|务必|一定要|应该|需要保持|始终|总是|永远|从现在|
          以后都|今后|只(?:能|用|要|需|可以)|最多|至少|不超过|优先|尽量|更喜欢|宁可|而不是|请记住|记住
    | してはいけ|しないで|してはなら|禁止|やめて|避けて|必ず|絶対|なければなら|ねばなら|べき|常に|いつも|今後|
          これから(?:は|も)|以後|のみ|だけ(?:を|に|使)|以内|以上|以下|優先|の方が(?:いい|良い|好)|できるだけ|覚えて
    | \b(?:nicht|niemals|nie|kein(?:e|en|er|es)?|darf(?:st)?|dürfen|verboten|vermeide[nt]?|muss|musst|müssen|soll(?:st|te|
          en)?|unbedingt|immer|stets|ab\s+(?:jetzt|sofort)|künftig|in\s+Zukunft|nur|höchstens|mindestens|lieber|bevorzuge|
          statt(?:dessen)?|anstatt)\b
    | \b(?:ne\s+\S+(?:\s+\S+)?\s+(?:pas|jamais|plus|rien)|n['’]\S+\s+(?:pas|jamais|plus)|jamais|interdit|évite[rz]?|
          éviter|doi[ts]|devez|devons|il\s+faut|obligatoire|toujours|désormais|dorénavant|à\s+partir\s+de\s+maintenant|
          à\s+l['’]avenir|seulement|uniquement|au\s+(?:plus|moins|maximum|minimum)|préfère|plutôt|au\s+lieu)\b
    | \b(?:no\s+(?:uses?|cambies?|toques?|modifiques?|hagas?|debes?|borres?|escribas?|añadas?|puede[sn]?|se\s+debe)|nunca|
          jamás|prohibido|evita[r]?|debe[sn]?|tiene[sn]?\s+que|hay\s+que|obligatorio|siempre|a\s+partir\s+de\s+ahora|
          de\s+ahora\s+en\s+adelante|en\s+(?:el\s+)?futuro|solo|sólo|solamente|únicamente|como\s+(?:máximo|mínimo)|
          al\s+menos|prefiero|mejor\s+(?:usa|que)|en\s+(?:lugar|vez)\s+de|asegúrate)\b
    """,
    re.X | re.I,
)

_DECISION = re.compile(
    r"\b(?:i(?:'ve|\s+have)?\s+decided|we(?:'ve|\s+have)?\s+decided|decision|i(?:'ll|\s+will)\s+(?:use|go\s+with|keep|switch)|let'?s\s+(?:use|go\s+with|keep)|going\s+with|instead\s+of|rather\s+than|"
    r"chose|opted|the\s+(?:best|right|simplest|cleanest)\s+(?:approach|fix|solution|way)|root\s+cause|the\s+(?:problem|issue|bug|reason)\s+(?:is|was))\b"
    r"|决定|采用|选择了|改用|原因是|根本原因|ことにし|採用|原因は|entschieden|stattdessen|Ursache|décidé|au\s+lieu|la\s+cause|decidido|en\s+lugar\s+de|la\s+causa",
    re.I,
)
_NEXT = re.compile(
    r"\b(?:next(?:\s+step)?s?|now\s+(?:i|let|we)|let\s+me|i(?:'ll|\s+will)|we(?:'ll|\s+will)|then\s+i|remaining|still\s+(?:need|to\s+do)|todo|plan)\b"
    r"|接下来|下一步|然后|次に|これから|als\s+Nächstes|nächster\s+Schritt|ensuite|prochaine\s+étape|a\s+continuación|siguiente\s+paso",
    re.I,
)
_CONCLUSION = re.compile(
    r"\b(?:done|fixed|complete[d]?|finished|implemented|works?|working|passes|pass(?:ed|ing)|verified|confirmed|found|created|added|updated|removed|changed|success(?:ful(?:ly)?)?|in\s+summary|summary|conclusion|"
    r"result|therefore|so\s+the|this\s+means|turns\s+out|because|the\s+(?:problem|issue|bug|reason|cause|answer)|root\s+cause)\b"
    r"|完成|已经|修复|结果|因此|所以|总结|完了|修正|結果|したがって|まとめ|fertig|behoben|abgeschlossen|Ergebnis|terminé|corrigé|résultat|donc|listo|terminado|corregido|resultado",
    re.I,
)


def _ends(sentence: str) -> str:
    """The sentence, or both ends of a very long one: it is a paste, and patterns need not wander through it."""
    return (
        sentence if len(sentence) <= LONGEST_SENTENCE else sentence[: LONGEST_SENTENCE // 2] + sentence[-LONGEST_SENTENCE // 2 :]
    )


def requests(text: str) -> list[str]:
    """The sentences of a user's message that ask for something; the first one when none plainly does."""
    said = sentences(text)
    asked = [sentence for sentence in said if _REQUEST.search(_ends(sentence))]
    return asked or list(said[:1])


def constraints(text: str) -> list[str]:
    """The sentences that forbid, oblige, prefer, or hold from now on."""
    return [sentence for sentence in sentences(text) if len(sentence) <= LONGEST_SENTENCE and _CONSTRAINT.search(sentence)]


def decisions(text: str) -> list[str]:
    """The sentences in which an assistant settles on a way or names a cause."""
    return [sentence for sentence in sentences(text) if len(sentence) <= LONGEST_SENTENCE and _DECISION.search(sentence)]


def conclusion(text: str) -> str:
    """The sentence that an assistant's message comes to: the last that states a result, else its last; empty for no words."""
    said = sentences(text)
    stated = [sentence for sentence in said if _CONCLUSION.search(_ends(sentence))]
    return (stated or said or ("",))[-1]


def next_step(text: str) -> str:
    """The last sentence in which an assistant says what it will do; empty when it does not."""
    return next((sentence for sentence in reversed(sentences(text)) if _NEXT.search(_ends(sentence))), "")
