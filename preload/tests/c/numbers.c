/* Makes system calls by number, by syscall(2), in places where a hook of it is difficult: before any constructor has
 * run, in a child that uses its parent's memory, and in a thread that is about to be cancelled. The output has to be the
 * same with and without the library. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/sched.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int early_pid, early_fd, early_errno;

/* Runs before the constructors of all libraries, because it is a preinit function. */
static void early(void)
{
    early_pid = syscall(SYS_getpid);
    early_fd = syscall(SYS_socket, AF_INET, SOCK_STREAM, 0);
    syscall(SYS_close, early_fd);
    if (syscall(SYS_close, early_fd) == -1)
        early_errno = errno;
}
__attribute__((section(".preinit_array"), used)) static void (*const run_early)(void) = early;

static int client, server;

static void fail(const char *what)
{
    printf("%s: %s\n", what, strerror(errno));
    exit(1);
}

/* Makes a connection whose two ends are both in this process. */
static void connect_to_self(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&at, len) || listen(listener, 1) || getsockname(listener, (void *)&at, &len))
        fail("listen");
    client = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(client, (void *)&at, len))
        fail("connect");
    server = accept(listener, NULL, NULL);
    close(listener);
}

/* Sends requests and answers on the connection, often enough to promote it. Returns the number of good rounds. */
static int converse(int rounds)
{
    char out[64], in[64];
    for (int i = 0; i < rounds; i++) {
        memset(out, i, sizeof out);
        for (int way = 0; way < 2; way++) {
            if (syscall(SYS_write, way ? server : client, out, sizeof out) != sizeof out)
                return i;
            if (recv(way ? client : server, in, sizeof in, MSG_WAITALL) != sizeof in || memcmp(in, out, sizeof in))
                return i;
        }
        usleep(200);
    }
    return rounds;
}

/* Runs in a child that shares its parent's memory but has a descriptor table of its own. */
static void borrower(void)
{
    long closed = syscall(SYS_close, client);
    long again = syscall(SYS_close, client);
    syscall(SYS_exit_group, closed == 0 && again == -1 ? 3 : 4);
}

/* The child of this clone returns from `syscall` on a stack of its own. On top of that stack lies the address of
 * `borrower`, so the child returns into that function. */
static void clones(void)
{
    static void *stack[8192] __attribute__((aligned(16)));
    void **top = &stack[8190];
    top[0] = (void *)borrower;
    int pid = syscall(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, &top[0], NULL, NULL, 0);
    int status = -1;
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        fail("clone");
    printf("clone on our memory: %d\n", WEXITSTATUS(status));
}

static void forks(void)
{
    int pid = syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, 0);
    if (pid == 0)
        syscall(SYS_exit_group, syscall(SYS_close, client) == 0 ? 5 : 6);
    int status = -1;
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        fail("fork");
    printf("fork: %d\n", WEXITSTATUS(status));
}

/* Calls by number are no cancellation points, so they work in a thread that is about to be cancelled. */
static void *cancelled(void *unused)
{
    char in[8];
    pthread_cancel(pthread_self());
    long sent = syscall(SYS_write, client, "12345678", 8);
    long got = syscall(SYS_read, server, in, 8);
    struct pollfd p = {server, POLLIN, 0};
    long polled = syscall(SYS_poll, &p, 1, 20);
    printf("to be cancelled: sent %ld, got %ld, polled %ld\n", sent, got, polled);
    fflush(stdout);
    pthread_testcancel();
    return unused;
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("early: %d %d %s\n", early_pid == getpid(), early_fd, strerror(early_errno));
    errno = 0;
    long none = syscall(100000);
    printf("no such number: %ld %s\n", none, strerror(errno));
    errno = 0;
    none = syscall(-1L);
    printf("no such number: %ld %s\n", none, strerror(errno));
    printf("six arguments: %d\n", (void *)syscall(SYS_mmap, 0, 4096, 0, 0x22, -1, 1) == (void *)-1);
    connect_to_self();
    printf("conversed %d\n", converse(600));
    clones();
    forks();
    printf("conversed %d\n", converse(100));
    pthread_t thread;
    void *result = NULL;
    pthread_create(&thread, NULL, cancelled, NULL);
    pthread_join(thread, &result);
    printf("cancelled: %d\n", result == PTHREAD_CANCELED);
    printf("conversed %d\n", converse(100));
    if (syscall(SYS_close, client))
        fail("close");
    printf("the end: %zd\n", read(server, &none, 1));
    return 0;
}
