/* The upstream of the benchmarks: answers a POST at once with a completion of 1 KB, or streams events, or holds its answer back.
 *
 *     cc -O2 -o stub stub.c && ./stub PORT
 *
 * The request says which, anywhere in its first 4 KB: `stub=COUNT@MICROSECONDS/TOGETHER` asks for COUNT events, one each so many
 * microseconds (0: as fast as the socket takes them), whose text holds the time at which they were sent, TOGETHER such streams at
 * the same moment; `stub=hold` for no answer at all. Of every held or streamed answer it tells over UDP, to its own port number on
 * loopback, that the request came ("came"), and that the other side went away before the answer was complete ("left"). One thread,
 * so that it fits beside the load.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { HEAD_SIZE = 4096, PIECE_SIZE = 512, TURN = 16 };

/* A connection. `timer` is its paced stream's clock, watched as a source of its own; `left` bytes of the request are to come. */
struct connection {
    int fd, timer, have, in_body, held, pending, sent_of_piece;
    uint32_t watched;
    long left, length, to_send;
    char head[HEAD_SIZE + 1], piece[PIECE_SIZE];
};

static int poll_fd, udp;
static struct sockaddr_in watcher;
static char body[2048], sink[1 << 18];

static void tell(const char *what) { sendto(udp, what, 4, MSG_DONTWAIT, (struct sockaddr *)&watcher, sizeof watcher); }

/* What epoll hands back: the connection, with the lowest bit set when its timer rang. */
static void watch(struct connection *c, int fd, uint32_t what, int operation, int timer) {
    struct epoll_event event = {.events = what, .data.u64 = (uintptr_t)c | timer};
    epoll_ctl(poll_fd, operation, fd, &event);
}

static void drop(struct connection *c) {
    if (c->held || c->to_send || c->pending) tell("left");
    if (c->timer >= 0) close(c->timer);
    close(c->fd);
    c->fd = c->timer = -1; /* freed after the turn: its other event may be in the same batch */
}

static void put(struct connection *c, int size) {
    c->pending = size;
    c->sent_of_piece = 0;
}

/* Write what is left of the piece: 1 when it is out, 0 when the socket is full, -1 when the other side is gone. */
static int flush(struct connection *c) {
    while (c->pending) {
        ssize_t wrote = send(c->fd, c->piece + c->sent_of_piece, c->pending, MSG_NOSIGNAL);
        if (wrote < 0) return errno == EAGAIN ? 0 : -1;
        c->sent_of_piece += wrote;
        c->pending -= wrote;
    }
    return 1;
}

static void next_piece(struct connection *c) {
    char event[PIECE_SIZE / 2];
    struct timespec now;
    if (--c->to_send == 0) { /* the last one ends the stream */
        put(c, sprintf(c->piece, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"));
        return;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    int size = sprintf(event, "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":"
                              "{\"content\":\"%ld.%06ld\"}}]}\n\n", (long)now.tv_sec, now.tv_nsec / 1000);
    put(c, sprintf(c->piece, "%x\r\n%s\r\n", size, event));
}

static void stream(struct connection *c, long most) {
    int out = flush(c), done;
    for (; out > 0 && c->to_send && most; most--) {
        next_piece(c);
        out = flush(c);
    }
    if (out < 0) {
        drop(c);
        return;
    }
    done = !c->to_send && !c->pending;
    /* a flood goes on as soon as the socket takes more, a paced stream only with what the socket did not take */
    uint32_t wanted = EPOLLIN | (c->pending || (c->timer < 0 && !done) ? EPOLLOUT : 0);
    if (wanted != c->watched) watch(c, c->fd, c->watched = wanted, EPOLL_CTL_MOD, 0);
    if (done && c->timer >= 0) {
        close(c->timer);
        c->timer = -1;
    }
}

/* When the next stream sends its first event, in microseconds. The moments are spread over the pause by the golden ratio and have
 * nothing to do with when its request came: else a proxy that starts many streams at once would get their chunks in batches, which
 * are cheap, and one that takes its time for each would get them one by one. */
static long first_event(long pause, long together) {
    static long streams;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long moment = streams++ / together * 618034 % 1000000 * pause / 1000000;
    return (now.tv_sec * 1000000 + now.tv_nsec / 1000) / pause * pause + pause + moment;
}

static void start_stream(struct connection *c, long count, long pause, long together) {
    c->to_send = count + 1;
    put(c, sprintf(c->piece, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"));
    if (pause) {
        long first = first_event(pause, together);
        struct itimerspec clock = {{pause / 1000000, pause % 1000000 * 1000}, {first / 1000000, first % 1000000 * 1000}};
        c->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
        timerfd_settime(c->timer, TFD_TIMER_ABSTIME, &clock, NULL);
        watch(c, c->timer, EPOLLIN, EPOLL_CTL_ADD, 1);
    }
    stream(c, pause ? 0 : TURN);
}

static void answer(struct connection *c) {
    char *wish = memmem(c->head, c->have, "stub=", 5);
    long count, pause, together = 1;
    c->have = c->in_body = 0;
    if (wish && !strncmp(wish, "stub=hold", 9)) {
        c->held = 1;
        tell("came");
    } else if (wish && sscanf(wish, "stub=%ld@%ld/%ld", &count, &pause, &together) >= 2) {
        tell("came");
        start_stream(c, count, pause, together);
    } else {
        char whole[4096]; /* a token is about five bytes of the benchmark's text */
        int size = snprintf(body, sizeof body, "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":"
            "[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"%0750d\"},\"finish_reason\":\"stop\"}],\"usage\":"
            "{\"prompt_tokens\":%ld,\"completion_tokens\":150,\"total_tokens\":%ld}}", 0, c->length / 5, c->length / 5 + 150);
        int all = sprintf(whole, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", size, body);
        if (send(c->fd, whole, all, MSG_NOSIGNAL) != all) drop(c);
    }
}

/* Takes what came of a request: its head, then as much body as it announced. */
static void take(struct connection *c, const char *data, long size) {
    long kept = size < HEAD_SIZE - c->have ? size : HEAD_SIZE - c->have;
    memcpy(c->head + c->have, data, kept);
    c->have += kept;
    c->head[c->have] = 0;
    if (!c->in_body) {
        char *end = strstr(c->head, "\r\n\r\n");
        if (!end) return;
        char *field = strcasestr(c->head, "\r\ncontent-length:");
        c->length = field && field < end ? atol(field + 17) : 0;
        c->left = c->length + (end + 4 - c->head) - (c->have - kept);
        c->in_body = 1;
    }
    if ((c->left -= size) <= 0) answer(c);
}

static void receive(struct connection *c) {
    for (;;) {
        ssize_t size = read(c->fd, sink, sizeof sink);
        if (size > 0) {
            take(c, sink, size);
            if (c->fd < 0 || size < (ssize_t)sizeof sink) return;
        } else {
            if (size == 0 || errno != EAGAIN) drop(c);
            return;
        }
    }
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    struct sockaddr_in address = {AF_INET, htons(port), {htonl(INADDR_LOOPBACK)}, {0}};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 4096)) return perror("stub"), -1;
    watcher = address;
    return fd;
}

static void accept_all(int listener) {
    int fd, on = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct connection *c = calloc(1, sizeof *c);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        c->fd = fd;
        c->timer = -1;
        watch(c, fd, c->watched = EPOLLIN, EPOLL_CTL_ADD, 0);
    }
}

int main(int count, char **arguments) {
    struct epoll_event events[256];
    int listener = listen_on(count > 1 ? atoi(arguments[1]) : 0);
    if (listener < 0) return 1;
    poll_fd = epoll_create1(0);
    udp = socket(AF_INET, SOCK_DGRAM, 0);
    watch(NULL, listener, EPOLLIN, EPOLL_CTL_ADD, 0);
    for (;;) {
        int ready = epoll_wait(poll_fd, events, 256, -1);
        for (int i = 0; i < ready; i++) {
            struct connection *c = (struct connection *)(events[i].data.u64 & ~(uint64_t)1);
            uint64_t rang;
            if (!c) {
                accept_all(listener);
            } else if (events[i].data.u64 & 1) {
                if (c->timer >= 0 && read(c->timer, &rang, 8) == 8) stream(c, (long)rang);
            } else {
                if (c->fd >= 0 && events[i].events & ~EPOLLOUT) receive(c);
                if (c->fd >= 0 && events[i].events & EPOLLOUT) stream(c, c->timer < 0 ? TURN : 0);
            }
        }
        for (int i = 0; i < ready; i++) { /* a connection may stand in the batch twice: free it at its last event */
            struct connection *c = (struct connection *)(events[i].data.u64 & ~(uint64_t)1);
            int again = 0;
            for (int j = i + 1; c && j < ready; j++) again |= (events[j].data.u64 & ~(uint64_t)1) == (uintptr_t)c;
            if (c && c->fd < 0 && !again) free(c);
        }
    }
}
