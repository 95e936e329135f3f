/* What a hook that passes through costs: recv on a descriptor that is not open, so that the kernel's
 * part is short, called through the hook and through libc's own address, alternately. Prints ns. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

enum { ROUNDS = 41, CALLS = 200000 };
typedef ssize_t recv_fn(int, void *, size_t, int);

static double once(recv_fn *call)
{
    struct timespec from, to;
    char byte;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < CALLS; i++)
        call(-1, &byte, 1, 0);
    clock_gettime(CLOCK_MONOTONIC, &to);
    return ((to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec)) / CALLS;
}

static int order(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

int main(void)
{
    void *libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    recv_fn *bare = libc ? (recv_fn *)dlsym(libc, "recv") : NULL, *hooked = (recv_fn *)dlsym(RTLD_DEFAULT, "recv");
    double bare_ns[ROUNDS], hooked_ns[ROUNDS], delta[ROUNDS];
    if (!bare || !hooked)
        return 1;
    for (int i = 0; i < ROUNDS; i++) {
        bare_ns[i] = once(bare);
        hooked_ns[i] = once(hooked);
        delta[i] = hooked_ns[i] - bare_ns[i];
    }
    qsort(bare_ns, ROUNDS, sizeof *bare_ns, order);
    qsort(hooked_ns, ROUNDS, sizeof *hooked_ns, order);
    qsort(delta, ROUNDS, sizeof *delta, order);
    printf("%s: bare %.1f ns, through the hook %.1f ns (fastest of %d); difference of pairs: median %.1f ns\n",
           bare == hooked ? "no hook" : "hooked", bare_ns[0], hooked_ns[0], ROUNDS, delta[ROUNDS / 2]);
    return 0;
}
