/* What the programs here share. They are plain programs of C, because signal handlers, siglongjmp and fork among threads
 * are what they are about; each prints the same on kernel TCP and with the library, and ends by itself. */
#ifndef COMMON_H
#define COMMON_H
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MUST(expression) \
    ({ \
        __typeof__(expression) value_ = (expression); \
        if (value_ < 0) { \
            dprintf(2, "%s:%d: %s: errno %d\n", __FILE__, __LINE__, #expression, errno); \
            _exit(1); \
        } \
        value_; \
    })
#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            dprintf(2, "%s:%d: not so: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno); \
            _exit(1); \
        } \
    } while (0)

static inline double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static inline void pause_us(long us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&t, &t) != 0 && errno == EINTR)
        ;
}

/* A socket that listens on some port of the loopback address, which `at` then names. */
static inline int listening(struct sockaddr_in *at)
{
    socklen_t len = sizeof *at;
    int fd = MUST(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    memset(at, 0, sizeof *at);
    at->sin_family = AF_INET;
    at->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    MUST(bind(fd, (struct sockaddr *)at, sizeof *at));
    MUST(listen(fd, 512));
    MUST(getsockname(fd, (struct sockaddr *)at, &len));
    return fd;
}

static inline int connected(const struct sockaddr_in *to)
{
    int fd = MUST(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    int one = 1;
    MUST(connect(fd, (const struct sockaddr *)to, sizeof *to));
    MUST(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    return fd;
}

/* All of it, whatever interrupts; 0 at the end of the stream, -1 on an error. */
static inline ssize_t get_all(int fd, void *buf, size_t len)
{
    for (size_t got = 0; got < len;) {
        ssize_t n = recv(fd, (char *)buf + got, len - got, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n;
        got += n;
    }
    return len;
}

static inline ssize_t put_all(int fd, const void *buf, size_t len)
{
    for (size_t put = 0; put < len;) {
        ssize_t n = send(fd, (const char *)buf + put, len - put, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return n;
        put += n;
    }
    return len;
}

/* Echoes what each connection brings, in a thread each, until it ends. */
static void *echo_one(void *arg)
{
    char buf[16384];
    int fd = (intptr_t)arg;
    for (;;) {
        ssize_t n = recv(fd, buf, sizeof buf, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0 || put_all(fd, buf, n) < 0)
            break;
    }
    close(fd);
    return NULL;
}

/* Echoes for ever. */
static inline void echo_server(int listener)
{
    for (;;) {
        pthread_t thread;
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            continue;
        if (pthread_create(&thread, NULL, echo_one, (void *)(intptr_t)fd) != 0)
            close(fd);
        else
            pthread_detach(thread);
    }
}

/* An echo server in a process of its own, which ends with this one; its address in `at`. */
static inline pid_t echo_process(struct sockaddr_in *at)
{
    int listener = listening(at);
    int held[2];
    MUST(pipe2(held, O_CLOEXEC));
    pid_t pid = MUST(fork());
    if (pid == 0) {
        pthread_t thread;
        char none;
        close(held[1]);
        pthread_create(&thread, NULL, (void *(*)(void *))echo_server, (void *)(intptr_t)listener);
        (void)!read(held[0], &none, 1);
        _exit(0);
    }
    close(held[0]);
    close(listener);
    return pid;
}
#endif
