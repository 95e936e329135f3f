/* Whole connections by calls on a stack of the program's own making, above which nothing can be unwound: as greenlets do,
 * which copy pieces of one stack over each other. A handler is installed, as Python does for SIGINT.
 *
 *     greenlet CONNECTIONS
 */
#include "common.h"
#include <ucontext.h>

static ucontext_t home, away;
static char stack[256 * 1024];
static int connections;

static void on_interrupt(int signal)
{
    (void)signal;
}

/* Its frame is found by its frame pointer, as its size is not known before. */
__attribute__((noinline)) static int framed(volatile int *value)
{
    volatile char *bytes = __builtin_alloca(*value + 64);
    bytes[*value] = 1;
    return *value + bytes[*value];
}

/* Where `framed` has its frame: behind mov %rsp,%rbp. */
static void *in_framed(void)
{
    char *at = (char *)framed;
    while (memcmp(at, "\x48\x89\xe5", 3) != 0)
        at++;
    return at + 4;
}

static void traffic(void)
{
    struct sockaddr_in at;
    int listener = listening(&at);
    for (int i = 0; i < connections; i++) {
        int client = connected(&at), server = MUST(accept(listener, NULL, NULL));
        for (int round = 0; round < 60; round++) {
            char byte = (char)round, back = 0;
            CHECK(put_all(client, &byte, 1) == 1 && get_all(server, &back, 1) == 1 && back == byte);
            CHECK(put_all(server, &back, 1) == 1 && get_all(client, &byte, 1) == 1 && back == byte);
        }
        MUST(close(client));
        MUST(close(server));
    }
    MUST(close(listener));
}

__attribute__((noinline)) static void body(void)
{
    /* The caller is, by what is written there, in the middle of `framed`, whose own frame is nowhere. */
    void **frame = __builtin_frame_address(0);
    frame[0] = (void *)16;
    frame[1] = in_framed();
    traffic();
    setcontext(&home);
}

int main(int argc, char **argv)
{
    volatile int none = 0;
    volatile int back = 0;
    connections = argc > 1 ? atoi(argv[1]) : 10;
    CHECK(framed(&none) == 1);
    MUST(sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt}, NULL));
    MUST(getcontext(&home));
    if (!back) {
        back = 1;
        MUST(getcontext(&away));
        away.uc_stack.ss_sp = stack;
        away.uc_stack.ss_size = sizeof stack;
        makecontext(&away, body, 0);
        setcontext(&away);
    }
    printf("all came back\n");
    return 0;
}
