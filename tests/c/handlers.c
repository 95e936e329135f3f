/* A handler that does what a handler may: each call that POSIX calls async-signal-safe, on connections of its own, above
 * whatever its thread is at, malloc too. A fast timer runs it; meanwhile the thread talks over a connection of its own,
 * and allocates. Whatever is said arrives.
 *
 *     handlers ROUNDS [small]
 *
 * `small`: the thread has a stack of 16 KiB, the handler an alternate one of 8 KiB beside what the kernel puts there.
 */
#include "common.h"

static struct sockaddr_in at, sink;
static int own = -1, listener = -1;
static volatile long ran, wrong;
static volatile int step;

/* Counts instead of ending: in a handler that is all that is sure to be seen. */
#define SO(condition) \
    do { \
        if (!(condition)) { \
            wrong++; \
            (void)!write(2, #condition "\n", sizeof #condition); \
        } \
    } while (0)

/* One byte there and back. */
static void byte_on(int fd, int how)
{
    char out = (char)ran, in = 0;
    struct iovec iov = {&out, 1};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    struct pollfd p = {fd, POLLIN, 0};
    fd_set set;
    ssize_t n;
    switch (how % 4) {
    case 0:
        SO(write(fd, &out, 1) == 1);
        break;
    case 1:
        SO(send(fd, &out, 1, MSG_NOSIGNAL) == 1);
        break;
    case 2:
        SO(sendto(fd, &out, 1, MSG_NOSIGNAL, NULL, 0) == 1);
        break;
    default:
        SO(sendmsg(fd, &message, MSG_NOSIGNAL) == 1);
    }
    switch (how % 3) {
    case 0:
        SO(poll(&p, 1, 10000) == 1);
        break;
    case 1:
        FD_ZERO(&set);
        FD_SET(fd, &set);
        SO(select(fd + 1, &set, NULL, NULL, NULL) == 1);
        break;
    default:
        break;
    }
    iov.iov_base = &in;
    switch (how % 5) {
    case 0:
        n = read(fd, &in, 1);
        break;
    case 1:
        n = recv(fd, &in, 1, 0);
        break;
    case 2:
        n = recvfrom(fd, &in, 1, 0, NULL, NULL);
        break;
    case 3:
        n = recvmsg(fd, &message, 0);
        break;
    default:
        n = recv(fd, &in, 1, MSG_WAITALL);
    }
    SO(n == 1 && in == out);
}

static void on_timer(int signal)
{
    int kept = errno, value = 0;
    socklen_t len = sizeof value;
    (void)signal;
    ran++;
    switch (step++ % 6) {
    case 0:
    case 1:
        byte_on(own, ran);
        break;
    case 2:
        SO(getsockopt(own, SOL_SOCKET, SO_ERROR, &value, &len) == 0 && value == 0);
        SO(setsockopt(own, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof value) == 0);
        SO(fcntl(own, F_GETFL) >= 0);
        SO(getpeername(own, (struct sockaddr *)&(struct sockaddr_in){0}, &(socklen_t){16}) == 0);
        break;
    case 3: {
        int copy = dup(own);
        SO(copy >= 0);
        byte_on(copy, ran);
        SO(dup2(own, copy) == copy);
        SO(close(copy) == 0);
        break;
    }
    case 4: {
        /* A connection for the moment. */
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), accepted;
        struct linger reset = {1, 0};
        char byte = 1;
        SO(fd >= 0 && connect(fd, (struct sockaddr *)&sink, sizeof sink) == 0);
        accepted = accept(listener, NULL, NULL);
        SO(accepted >= 0);
        SO(send(fd, &byte, 1, MSG_NOSIGNAL) == 1 && recv(accepted, &byte, 1, 0) == 1);
        SO(shutdown(accepted, SHUT_WR) == 0 && recv(fd, &byte, 1, 0) == 0);
        SO(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset) == 0);
        SO(close(fd) == 0 && close(accepted) == 0);
        break;
    }
    default: {
        /* So many that memory for them is not at hand. */
        static struct pollfd many[300];
        for (int i = 0; i < 300; i++)
            many[i] = (struct pollfd){i % 2 ? own : -1, POLLOUT, 0};
        SO(poll(many, 300, 0) == 150);
    }
    }
    errno = kept;
}

/* What the thread does meanwhile. */
static void talk(int rounds)
{
    enum { MOST = 3000 };
    char *out = malloc(MOST), *in = malloc(MOST);
    void *kept[16] = {0};
    int fd = connected(&at), set = MUST(epoll_create1(EPOLL_CLOEXEC));
    unsigned seed = 7;
    struct epoll_event event = {.events = EPOLLIN};
    MUST(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
    for (int round = 0; round < rounds; round++) {
        int len = 1 + rand_r(&seed) % MOST;
        memset(out, round, len);
        CHECK(put_all(fd, out, len) == len);
        if (round % 2)
            while (epoll_wait(set, &event, 1, -1) < 0)
                CHECK(errno == EINTR);
        CHECK(get_all(fd, in, len) == len);
        CHECK(memcmp(in, out, len) == 0);
        for (int i = 0; i < 200; i++) {
            void **slot = &kept[rand_r(&seed) % 16];
            free(*slot);
            *slot = malloc(rand_r(&seed) % 20000);
        }
        if (round % 16 == 0) {
            int other = connected(&at), copy;
            CHECK(put_all(other, out, 100) > 0 && get_all(other, in, 100) > 0);
            copy = MUST(dup(other));
            CHECK(close(other) == 0 && close(copy) == 0);
        }
    }
    for (int i = 0; i < 16; i++)
        free(kept[i]);
    free(out);
    free(in);
    close(fd);
    close(set);
}

static int rounds;

static void *whole(void *arg)
{
    (void)arg;
    struct itimerspec every = {{0, 300000}, {0, 300000}};
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
    timer_t timer;
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif
    event.sigev_notify_thread_id = syscall(SYS_gettid);
    MUST(timer_create(CLOCK_MONOTONIC, &event, &timer));
    MUST(timer_settime(timer, 0, &every, NULL));
    talk(rounds);
    MUST(timer_delete(timer));
    return NULL;
}

/* The stack of a thread as small as it may be. */
static void *small(void *arg)
{
    static char other[32768];
    /* The kernel puts the registers there: what it says that takes, and 8 KiB. */
    stack_t stack = {.ss_sp = other, .ss_size = sysconf(_SC_MINSIGSTKSZ) + 8192};
    MUST(sigaltstack(&stack, NULL));
    return whole(arg);
}

int main(int argc, char **argv)
{
    int is_small = argc > 2;
    rounds = argc > 1 ? atoi(argv[1]) : 1000;
    setvbuf(stdout, NULL, _IONBF, 0);
    pid_t pid = echo_process(&at);
    listener = listening(&sink);
    own = connected(&at);
    /* Worth moving. */
    for (int i = 0; i < 100; i++)
        byte_on(own, i);
    struct sigaction action = {.sa_handler = on_timer, .sa_flags = SA_RESTART | (is_small ? SA_ONSTACK : 0)};
    MUST(sigaction(SIGUSR1, &action, NULL));
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (is_small)
        CHECK(pthread_attr_setstacksize(&attributes, 16384) == 0);
    CHECK(pthread_create(&thread, &attributes, is_small ? small : whole, NULL) == 0);
    pthread_join(thread, NULL);
    CHECK(wrong == 0);
    CHECK(rounds < 100 || ran > 10);
    kill(pid, SIGKILL);
    printf("all is said\n");
    _exit(0);
}
