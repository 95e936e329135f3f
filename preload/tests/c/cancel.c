/* Cancels a thread that is blocked in a hooked call. Checks that the cancellation ends the thread and runs its clean-up
 * handler, and that the process goes on. Prints one line for each call. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int ends[2], pipe_ends[2], epoll, listener, lingering;
static char fifo[64];
static volatile int entered, cleaned;
static volatile pid_t tid;

static void block_read(void) { char b[8]; (void)!read(pipe_ends[0], b, sizeof b); }
static void block_recv(void) { char b[8]; recv(ends[0], b, sizeof b, 0); }
static void block_recvmsg(void)
{
    char b[8];
    struct iovec iov = {b, sizeof b};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    recvmsg(ends[0], &m, 0);
}
static void block_poll(void) { struct pollfd p = {ends[0], POLLIN, 0}; poll(&p, 1, -1); }
static void block_select(void)
{
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ends[0], &set);
    select(ends[0] + 1, &set, NULL, NULL, NULL);
}
static void block_epoll(void) { struct epoll_event e; epoll_wait(epoll, &e, 1, -1); }
static void block_open(void) { open(fifo, O_RDONLY); }
static void block_accept(void) { accept(listener, NULL, NULL); }
/* Closes a socket that lingers (SO_LINGER), with more bytes to send than its peer takes. */
static void block_close(void) { close(lingering); }
static int connect_lingering(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    struct linger linger = {1, 60};
    static char bytes[1 << 16];
    int server = socket(AF_INET, SOCK_STREAM, 0);
    lingering = socket(AF_INET, SOCK_STREAM, 0);
    if (listen(server, 1) || getsockname(server, (struct sockaddr *)&address, &length)
        || connect(lingering, (struct sockaddr *)&address, length)
        || setsockopt(lingering, SOL_SOCKET, SO_LINGER, &linger, sizeof linger))
        return 1;
    while (send(lingering, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        ;
    return 0;
}
static void block_dprintf(void)
{
    static char big[1 << 16];
    memset(big, 'x', sizeof big - 1);
    for (;;)
        dprintf(pipe_ends[1], "%s %d %f", big, 1, 2.0);
}

static void cleanup(void *arg) { (void)arg; cleaned = 1; }

static void *run(void *call)
{
    pthread_cleanup_push(cleanup, NULL);
    tid = syscall(SYS_gettid);
    entered = 1;
    ((void (*)(void))call)();
    pthread_cleanup_pop(0);
    return NULL;
}

/* Waits until the thread `tid` sleeps in the kernel. */
static void wait_asleep(void)
{
    char path[64], line[256], *state;
    for (;;) {
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
        FILE *f = fopen(path, "r");
        if (f && fgets(line, sizeof line, f) && (state = strrchr(line, ')')) && state[2] == 'S') {
            fclose(f);
            return;
        }
        if (f)
            fclose(f);
        usleep(1000);
    }
}

static int cancel(const char *name, void (*call)(void))
{
    pthread_t thread;
    void *result = NULL;
    entered = cleaned = 0;
    if (pthread_create(&thread, NULL, run, (void *)call))
        return 1;
    while (!entered)
        usleep(1000);
    wait_asleep();
    pthread_cancel(thread);
    pthread_join(thread, &result);
    printf("%s %s\n", name, result == PTHREAD_CANCELED && cleaned ? "cancelled" : "NOT cancelled");
    fflush(stdout);
    return result != PTHREAD_CANCELED || !cleaned;
}

int main(void)
{
    int bad = 0;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) || pipe(pipe_ends) || (epoll = epoll_create1(0)) < 0)
        return 2;
    snprintf(fifo, sizeof fifo, "/tmp/rdmasock-cancel-%d", getpid());
    listener = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr unnamed = {AF_UNIX, ""};
    if (mkfifo(fifo, 0600) || bind(listener, &unnamed, sizeof unnamed.sa_family) || listen(listener, 1))
        return 2;
    bad |= cancel("open", block_open);
    unlink(fifo);
    bad |= cancel("accept", block_accept);
    bad |= cancel("read", block_read);
    bad |= cancel("recv", block_recv);
    bad |= cancel("recvmsg", block_recvmsg);
    bad |= cancel("poll", block_poll);
    bad |= cancel("select", block_select);
    bad |= cancel("epoll_wait", block_epoll);
    bad |= connect_lingering() || cancel("close", block_close);
    bad |= cancel("dprintf", block_dprintf);
    _exit(bad); /* A cancelled dprintf leaves a FILE behind on which glibc's exit can stumble. */
}
