/*
 * What malloc and its kin promise, with blocks of all sizes: `alloc CASE`. It runs on any malloc; the test runs it
 * on libc's, and on the registered allocator with the library and without. Silent and 0 if all is well.
 */
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#undef NDEBUG
#define check(what)                                                                        \
    do {                                                                                   \
        if (!(what)) {                                                                     \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno);   \
            _exit(1);                                                                      \
        }                                                                                  \
    } while (0)

/* The compiler is not to know what malloc does. */
static void *volatile seen;

static void *hide(void *at)
{
    seen = at;
    return seen;
}

static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static size_t some_size(uint64_t *state)
{
    switch (next(state) % 4) {
    case 0: return next(state) % 4096;
    case 1: return 60000 + next(state) % 12000;
    case 2: return 65536 + next(state) % 300000;
    default: return next(state) % (5 << 20);
    }
}

struct block {
    unsigned char *at;
    size_t len;
    unsigned char tag;
};

static void mark(struct block *block)
{
    for (size_t i = 0; i < block->len; i += 1024)
        block->at[i] = block->tag;
    if (block->len > 0)
        block->at[block->len - 1] = block->tag;
}

static void look(const struct block *block, size_t len)
{
    for (size_t i = 0; i < len; i += 1024)
        check(block->at[i] == block->tag);
    if (len > 0 && len == block->len)
        check(block->at[len - 1] == block->tag);
}

/* So many steps with blocks of a thread's own. */
static void steps(uint64_t seed, int count)
{
    enum { MOST = 40 };
    struct block held[MOST] = { 0 };
    uint64_t state = seed * 0x9e3779b97f4a7c15u | 1;
    for (int n = 0; n < count; n++) {
        struct block *block = &held[next(&state) % MOST];
        size_t len = some_size(&state);
        if (block->at == NULL) {
            size_t align = (size_t)8 << next(&state) % 15;
            void *at = NULL;
            switch (next(&state) % 4) {
            case 0: at = malloc(len); break;
            case 1:
                at = calloc(1, len);
                for (size_t i = 0; i < len; i += 512)
                    check(((char *)at)[i] == 0);
                break;
            case 2: check(posix_memalign(&at, align, len) == 0 && (uintptr_t)at % align == 0); break;
            default: at = aligned_alloc(align, len); check((uintptr_t)at % align == 0); break;
            }
            check(at != NULL && malloc_usable_size(at) >= len && (uintptr_t)at % 8 == 0);
            *block = (struct block){ at, len, (unsigned char)next(&state) };
            mark(block);
        } else if (next(&state) % 3 == 0) {
            size_t less = len < block->len ? len : block->len;
            look(block, block->len);
            len = len ? len : 1;
            block->at = realloc(block->at, len);
            check(block->at != NULL);
            look(block, less);
            block->len = len;
            mark(block);
        } else {
            look(block, block->len);
            free(block->at);
            block->at = NULL;
        }
    }
    for (int i = 0; i < MOST; i++)
        free(held[i].at);
}

static volatile int is_over;

static void *work(void *seed)
{
    steps((uintptr_t)seed, 4000);
    return NULL;
}

static void *work_on(void *seed)
{
    for (uint64_t n = 0; !is_over; n++)
        steps((uintptr_t)seed + 100 * n, 50);
    return NULL;
}

static void threads(void)
{
    pthread_t ids[6];
    for (uintptr_t i = 0; i < 6; i++)
        check(pthread_create(&ids[i], NULL, work, (void *)(i + 1)) == 0);
    for (int i = 0; i < 6; i++)
        check(pthread_join(ids[i], NULL) == 0);
}

/* One thread frees what another has allocated. */
static void *volatile handed[64];

static void *give(void *unused)
{
    (void)unused;
    uint64_t state = 99;
    while (!is_over) {
        unsigned char *at = malloc(70000 + next(&state) % 200000);
        check(at != NULL);
        at[0] = at[69999] = 7;
        at = __atomic_exchange_n(&handed[next(&state) % 64], at, __ATOMIC_ACQ_REL);
        check(at == NULL || (at[0] == 7 && at[69999] == 7));
        free(at);
    }
    return NULL;
}

static void handing(void)
{
    pthread_t ids[4];
    for (int i = 0; i < 4; i++)
        check(pthread_create(&ids[i], NULL, give, NULL) == 0);
    usleep(700000);
    is_over = 1;
    for (int i = 0; i < 4; i++)
        check(pthread_join(ids[i], NULL) == 0);
}

static void wait_for(pid_t child)
{
    int status = -1;
    check(waitpid(child, &status, 0) == child && status == 0);
}

/* Children that are forked while other threads are anywhere in malloc: by fork, and past libc. */
static void forks(void)
{
    pthread_t ids[3];
    for (uintptr_t i = 0; i < 3; i++)
        check(pthread_create(&ids[i], NULL, work_on, (void *)(i + 1)) == 0);
    unsigned char *kept = malloc(3 << 20);
    memset(kept, 5, 3 << 20);
    for (int n = 0; n < 60; n++) {
        pid_t child = n % 2 ? fork() : (pid_t)syscall(SYS_fork);
        check(child >= 0);
        if (child == 0) {
            /* glibc's own blocks are not to be used after the second: large ones are the arenas'. */
            for (int i = 0; i < 3 << 20; i += 4096)
                check(kept[i] == 5);
            for (int i = 0; i < 20; i++) {
                size_t len = (100 << 10) + i * 200000;
                if (n % 2 == 0 && getenv("FORKED_BY_LIBC_ALONE"))
                    break;
                unsigned char *at = hide(malloc(len));
                check(at != NULL);
                memset(at, i, len);
                at = realloc(at, 2 * len);
                check(at != NULL && at[len - 1] == (unsigned char)i);
                free(at);
            }
            memset(kept, 6, 3 << 20);
            free(kept);
            _exit(0);
        }
        wait_for(child);
        check(kept[0] == 5 && kept[(3 << 20) - 1] == 5);
    }
    is_over = 1;
    for (int i = 0; i < 3; i++)
        check(pthread_join(ids[i], NULL) == 0);
    free(kept);
}

static void is_refused(void *at)
{
    check(hide(at) == NULL && errno == ENOMEM);
    errno = 0;
}

static void semantics(void)
{
    volatile size_t most = SIZE_MAX, half = SIZE_MAX / 2;
    void *at = hide((void *)&most), *before = at;
    errno = 0;
    is_refused(malloc(most));
    is_refused(malloc(half));
    is_refused(calloc(half, 4));
    is_refused(calloc(1 << 20, most >> 19));
    is_refused(realloc(NULL, half));
    is_refused(reallocarray(NULL, half, 3));
    is_refused(memalign(64, half));
    is_refused(pvalloc(most - 100));
    for (size_t align = 0; align < 4; align++)
        check(posix_memalign(&at, align, 100000) == EINVAL && at == before);
    check(posix_memalign(&at, 24, 100000) == EINVAL && at == before);
    check(posix_memalign(&at, 64, half) == ENOMEM && at == before);

    unsigned char *block = malloc(1 << 20);
    memset(block, 3, 1 << 20);
    is_refused(realloc(hide(block), half));
    check(block[0] == 3 && block[(1 << 20) - 1] == 3);
    block = realloc(block, 200 << 20);
    check(block != NULL && block[(1 << 20) - 1] == 3);
    block = realloc(block, 100);
    check(block != NULL && block[0] == 3 && block[99] == 3);
    block = realloc(block, 100000);
    check(block != NULL && block[99] == 3);
    errno = 55;
    check(realloc(block, 0) == NULL);
    check((block = hide(malloc(0))) != NULL);
    free(block);
    free(NULL);
    free(hide(malloc(3 << 20)));
    check(errno == 55);
    check(malloc_usable_size(NULL) == 0);
    for (size_t len = 1; len < 20000000; len = 3 * len + 1) {
        check((uintptr_t)(at = hide(valloc(len))) % 4096 == 0 && at != NULL);
        free(at);
        check((uintptr_t)(at = hide(pvalloc(len))) % 4096 == 0 && malloc_usable_size(at) >= (len + 4095) / 4096 * 4096);
        free(at);
        check((uintptr_t)(at = hide(memalign(8 << 20, len))) % (8 << 20) == 0 && at != NULL);
        free(at);
    }
    /* More than one arena has. */
    void *many[40];
    for (int i = 0; i < 40; i++)
        check((many[i] = hide(malloc(100 << 20))) != NULL);
    for (int i = 0; i < 40; i++)
        free(many[i]);
    /* A stack with a guard page, in memory of malloc. */
    check(posix_memalign(&at, 4096, 1 << 20) == 0);
    check(mprotect(at, 4096, PROT_NONE) == 0 && mprotect(at, 4096, PROT_READ | PROT_WRITE) == 0);
    memset(at, 1, 1 << 20);
    free(at);
}

static long resident(void)
{
    char text[100] = "";
    int fd = open("/proc/self/statm", O_RDONLY);
    check(fd >= 0 && read(fd, text, sizeof text - 1) > 0);
    close(fd);
    return atol(strchr(text, ' ')) * 4096;
}

static void memory(void)
{
    enum { COUNT = 60, LEN = 10 << 20 };
    void *blocks[COUNT];
    long before = resident();
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < COUNT; i++)
            memset(blocks[i] = malloc(LEN), 1, LEN);
        check(resident() - before > (long)COUNT * LEN * 9 / 10);
        for (int i = 0; i < COUNT; i++)
            free(blocks[i]);
        check(resident() - before < 150 << 20);
        /* What goes is not what is in use. */
        unsigned char *low = calloc(1, LEN), *high = calloc(30, LEN);
        memset(low, 2, LEN);
        free(high);
        check(low[0] == 2 && low[LEN - 1] == 2);
        free(low);
    }
}

/* A limit on addresses, as it was set before the program began: it gets as far as libc's malloc does. */
static void limited(void)
{
    if (getenv("IS_LIMITED") == NULL) {
        struct rlimit limit = { 400 << 20, 400 << 20 };
        check(setrlimit(RLIMIT_AS, &limit) == 0 && setenv("IS_LIMITED", "1", 1) == 0);
        char *words[] = { "alloc", "limited", NULL };
        execv("/proc/self/exe", words);
        check(0);
    }
    void *blocks[400];
    int count = 0;
    while (count < 400 && (blocks[count] = hide(malloc(1 << 20))) != NULL)
        memset(blocks[count++], 1, 1 << 20);
    check(count > 250 && count < 400 && errno == ENOMEM);
    for (int i = 0; i < count; i++)
        free(blocks[i]);
    void *again = hide(malloc(100 << 20));
    check(again != NULL);
    free(again);
}

/* One on data, which comes while the program runs. */
static void limited_late(void)
{
    free(hide(malloc(1 << 20)));
    struct rlimit limit = { 200 << 20, 200 << 20 };
    check(setrlimit(RLIMIT_DATA, &limit) == 0);
    void *blocks[400];
    int count = 0;
    while (count < 400 && (blocks[count] = hide(malloc(1 << 20))) != NULL)
        memset(blocks[count++], 1, 1 << 20);
    check(count > 150 && count < 250 && errno == ENOMEM);
    for (int i = 0; i < count; i++)
        free(blocks[i]);
    for (int i = 0; i < count / 2; i++)
        check((blocks[i] = hide(malloc(1 << 20))) != NULL);
    steps(7, 0);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        { "semantics", semantics }, { "threads", threads }, { "handing", handing },           { "forks", forks },
        { "memory", memory },       { "limited", limited }, { "limited_late", limited_late },
    };
    check(argc == 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
    }
    return 2;
}
