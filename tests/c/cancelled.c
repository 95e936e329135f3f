/* pthread_cancel of a thread that is in a signal handler above a blocked receive, or that is never blocked.
 *
 *     cancelled ROUNDS how
 *
 * `how`: `handler`, the handler sends and receives too, and its connections work for others afterwards; `busy`, the thread
 * makes calls that find what they are for at once: each is a cancellation point.
 */
#include "common.h"

static int blocked, busy, set;

static void join(pthread_t thread, int what)
{
    struct timespec late;
    void *ended;
    clock_gettime(CLOCK_REALTIME, &late);
    late.tv_sec += 10;
    if (pthread_timedjoin_np(thread, &ended, &late) != 0) {
        dprintf(2, "%d: the thread goes on\n", what);
        _exit(1);
    }
    CHECK(ended == PTHREAD_CANCELED);
}

/* Sends and receives, without waiting. */
static void talk(int signal)
{
    char bytes[64] = {0};
    (void)signal;
    for (int i = 0; i < 100; i++) {
        send(busy, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        recv(busy, bytes, sizeof bytes, MSG_DONTWAIT);
    }
}

static void *receive(void *none)
{
    char byte;
    for (;;)
        recv(blocked, &byte, 1, 0);
    return none;
}

/* What others send comes back to them, behind all that the handler has sent. */
static void works(int fd)
{
    char last = 1, bytes[4096];
    ssize_t n;
    CHECK(put_all(fd, &last, 1) == 1);
    do {
        n = recv(fd, bytes, sizeof bytes, 0);
        CHECK(n > 0 || errno == EINTR);
    } while (n < 0 || bytes[n - 1] != last);
}

static void in_handlers(int rounds, const struct sockaddr_in *at)
{
    struct sigaction action = {.sa_handler = talk, .sa_flags = SA_RESTART};
    MUST(sigaction(SIGUSR1, &action, NULL));
    blocked = connected(at);
    busy = connected(at);
    for (int i = 0; i < 100; i++) {
        works(blocked);
        works(busy);
    }
    for (int round = 0; round < rounds; round++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, receive, NULL) == 0);
        pause_us(200);
        for (int i = 0; i < 4; i++) {
            CHECK(pthread_kill(thread, SIGUSR1) == 0);
            for (double until = seconds() + round * 13 % 97 * 1e-6; seconds() < until;)
                ;
        }
        CHECK(pthread_cancel(thread) == 0);
        join(thread, round);
        works(busy);
        works(blocked);
    }
}

enum call { RECV, READ, READV, RECVMSG, RECVMMSG, SEND, WRITE, SENDMSG, POLL, SELECT, EPOLL, CALLS };

static void *call_on(void *which)
{
    char bytes[16] = {0};
    for (;;) {
        struct iovec piece = {bytes, sizeof bytes};
        struct mmsghdr message = {.msg_hdr = {.msg_iov = &piece, .msg_iovlen = 1}};
        struct pollfd entry = {.fd = busy, .events = POLLIN};
        struct epoll_event event;
        struct timeval no_time = {0, 0};
        fd_set fds;
        FD_ZERO(&fds);
        FD_SET(busy, &fds);
        switch ((intptr_t)which) {
        case RECV:
            recv(busy, bytes, sizeof bytes, MSG_DONTWAIT);
            break;
        case READ:
            (void)!read(busy, bytes, 1);
            break;
        case READV:
            (void)!readv(busy, &piece, 1);
            break;
        case RECVMSG:
            recvmsg(busy, &message.msg_hdr, MSG_PEEK);
            break;
        case RECVMMSG:
            recvmmsg(busy, &message, 1, MSG_DONTWAIT, NULL);
            break;
        case SEND:
            send(busy, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
            break;
        case WRITE:
            (void)!write(busy, bytes, sizeof bytes);
            break;
        case SENDMSG:
            sendmsg(busy, &message.msg_hdr, MSG_DONTWAIT | MSG_NOSIGNAL);
            break;
        case POLL:
            poll(&entry, 1, 0);
            break;
        case SELECT:
            select(busy + 1, &fds, NULL, NULL, &no_time);
            break;
        case EPOLL:
            epoll_wait(set, &event, 1, 0);
            break;
        }
    }
    return NULL;
}

static void in_calls(int rounds, const struct sockaddr_in *at)
{
    for (int round = 0; round < rounds * CALLS; round++) {
        struct epoll_event event = {.events = EPOLLIN};
        pthread_t thread;
        busy = connected(at);
        set = MUST(epoll_create1(EPOLL_CLOEXEC));
        MUST(epoll_ctl(set, EPOLL_CTL_ADD, busy, &event));
        for (int i = 0; i < 100; i++)
            works(busy);
        pause_us(2000);
        works(busy);
        MUST(fcntl(busy, F_SETFL, O_NONBLOCK));
        CHECK(pthread_create(&thread, NULL, call_on, (void *)(intptr_t)(round % CALLS)) == 0);
        pause_us(1000);
        CHECK(pthread_cancel(thread) == 0);
        join(thread, round % CALLS);
        close(busy);
        close(set);
    }
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    struct sockaddr_in at;
    alarm(60);
    echo_process(&at);
    if (argc > 2 && strcmp(argv[2], "busy") == 0)
        in_calls(rounds, &at);
    else
        in_handlers(rounds, &at);
    printf("every thread has ended\n");
    return 0;
}
