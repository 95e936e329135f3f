/* How much stack a call takes that a handler may make: the alternate stack is painted, a handler makes the one call, and what is no
 * longer painted was used. The calls go on while the connection is promoted, so each is seen before, meanwhile and after.
 *
 *     stack ROUNDS
 */
#include "common.h"

/* What a call may take, below the handler's own frame; and one that carries out a step of a promotion, which are a few in the life
 * of a connection. */
enum { BOUND = 2048, STEP = 4096, STEPS = 8, SIZE = 65536, PAINT = 0xa5 };

static unsigned char *stack;
static struct sockaddr_in at, own_at;
static int fd, set, listener;

/* What the call of the moment gives and takes. */
static volatile int result, made;
static char byte;
static struct iovec piece = {&byte, 1};
static struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
static struct pollfd entry;
static struct pollfd many[300];
static fd_set numbers;
static struct epoll_event event;
static int value;
static socklen_t length;

#define CALLS(each) \
    each(write, write(fd, &byte, 1)) \
    each(read, read(fd, &byte, 1)) \
    each(send, send(fd, &byte, 1, MSG_NOSIGNAL)) \
    each(recv, recv(fd, &byte, 1, 0)) \
    each(sendto, sendto(fd, &byte, 1, MSG_NOSIGNAL, NULL, 0)) \
    each(recvfrom, recvfrom(fd, &byte, 1, 0, NULL, NULL)) \
    each(sendmsg, sendmsg(fd, &message, MSG_NOSIGNAL)) \
    each(recvmsg, recvmsg(fd, &message, 0)) \
    each(writev, writev(fd, &piece, 1)) \
    each(readv, readv(fd, &piece, 1)) \
    each(send_first, send(fd, &byte, 1, MSG_NOSIGNAL)) \
    each(poll, poll(&entry, 1, -1)) \
    each(ppoll, ppoll(&entry, 1, NULL, NULL)) \
    each(poll_many, poll(many, 300, -1)) \
    each(select, select(fd + 1, &numbers, NULL, NULL, NULL)) \
    each(pselect, pselect(fd + 1, &numbers, NULL, NULL, NULL, NULL)) \
    each(epoll_wait, epoll_wait(set, &event, 1, -1)) \
    each(recv_waitall, recv(fd, &byte, 1, MSG_WAITALL)) \
    each(poll_nothing, poll(&entry, 1, 0)) \
    each(epoll_nothing, epoll_wait(set, &event, 1, 0)) \
    each(recv_nothing, recv(fd, &byte, 1, MSG_DONTWAIT)) \
    each(getsockopt, getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &length)) \
    each(setsockopt, setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof value)) \
    each(getpeername, getpeername(fd, (struct sockaddr *)&own_at, &length)) \
    each(fcntl, fcntl(fd, F_GETFL)) \
    each(dup, made = dup(fd)) \
    each(dup2, dup2(fd, made)) \
    each(close_copy, close(made)) \
    each(socket, made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) \
    each(connect, connect(made, (struct sockaddr *)&at, sizeof at)) \
    each(shutdown, shutdown(made, SHUT_RDWR)) \
    each(close, close(made)) \
    each(accept, made = accept(listener, NULL, NULL)) \
    each(close_accepted, close(made))

#define NAME(name, call) #name,
static const char *const names[] = {CALLS(NAME)};
enum { COUNT = sizeof names / sizeof *names };
static long most[COUNT];
static volatile int chosen;

static void on_signal(int signal)
{
    int kept = errno;
    (void)signal;
    switch (chosen) {
#define NUMBER(name, call) CALL_##name,
        enum { CALLS(NUMBER) };
#define CASE(name, call) \
    case CALL_##name: \
        result = call; \
        break;
        CALLS(CASE)
    }
    errno = kept;
}

/* Where the handler's own frame ends: it makes no call then. */
static long used(int call)
{
    memset(stack, PAINT, SIZE);
    chosen = call;
    raise(SIGUSR1);
    long clean = 0;
    while (clean < SIZE && stack[clean] == PAINT)
        clean++;
    return SIZE - clean;
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 100, over = 0;
    setvbuf(stdout, NULL, _IONBF, 0);
    pid_t pid = echo_process(&at);
    fd = connected(&at);
    listener = listening(&own_at);
    static _Alignas(64) unsigned char painted[SIZE];
    stack = painted;
    stack_t alternate = {.ss_sp = stack, .ss_size = SIZE};
    MUST(sigaltstack(&alternate, NULL));
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    MUST(sigaction(SIGUSR1, &action, NULL));
    /* Outside of handlers first: what is made once in a process, and never by a handler, is there then. */
    int other = connected(&at);
    for (int i = 0; i < 40; i++)
        CHECK(put_all(other, "once", 4) > 0 && get_all(other, (char[4]){0}, 4) > 0);
    set = MUST(epoll_create1(EPOLL_CLOEXEC));
    event.events = EPOLLIN;
    MUST(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
    for (int round = 0; round < rounds; round++) {
        long bare = used(COUNT);
        for (int call = 0; call < COUNT; call++) {
            int waiting = -1;
            length = sizeof value;
            entry = (struct pollfd){fd, POLLIN, 0};
            for (int i = 0; i < 300; i++)
                many[i] = (struct pollfd){i % 2 ? fd : -1, POLLIN, 0};
            FD_ZERO(&numbers);
            FD_SET(fd, &numbers);
            if (strcmp(names[call], "getpeername") == 0)
                length = sizeof own_at;
            if (strcmp(names[call], "accept") == 0) {
                struct sockaddr_in to = own_at;
                length = sizeof to;
                MUST(getsockname(listener, (struct sockaddr *)&to, &length));
                waiting = connected(&to);
            }
            long now = used(call) - bare;
            if (now > most[call])
                most[call] = now;
            if (now > BOUND) {
                over++;
                /* The other threads that the step needs may not have a processor: the next call is not to be in the same one. */
                usleep(5000);
            }
            CHECK(result >= 0 || strcmp(names[call], "recv_nothing") == 0);
            if (waiting >= 0)
                close(waiting);
        }
    }
    for (int call = 0; call < COUNT; call++) {
        if (getenv("STACK_SHOW") != NULL)
            dprintf(2, "%-16s %5ld\n", names[call], most[call]);
        if (most[call] > STEP)
            printf("%s takes %ld bytes\n", names[call], most[call]);
    }
    if (over > STEPS)
        printf("%d calls took more than %d bytes\n", over, BOUND);
    kill(pid, SIGKILL);
    printf("the rest fits\n");
    _exit(0);
}
