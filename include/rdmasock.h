/*
 * rdmasock.h: what a program may ask of librdmasock.so that has no place in the calls of sockets.
 *
 * The functions are looked up by dlsym(3) when they are first called: a program that includes this is linked with
 * nothing of rdmasock, and runs without it. Then each function fails with ENOSYS. (Before glibc 2.34 dlsym needs -ldl.)
 * docs/header.md says what each is good for. None may be called by a signal handler.
 *
 * C99 or later, or C++; gcc or clang.
 */
#ifndef RDMASOCK_H
#define RDMASOCK_H

#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What one direction of a connection runs on. */
enum rdmasock_way {
    RDMASOCK_TCP = 0,  /* the kernel's TCP */
    RDMASOCK_SHM = 1,  /* shared memory, within a host */
    RDMASOCK_RDMA = 2, /* RDMA, between hosts */
    RDMASOCK_LINK = 3  /* for rdmasock_prefer(): shared memory or RDMA, whichever leads to the peer */
};
#define RDMASOCK_WAYS 3

/* Why a direction is on TCP: the reasons of `rdmasock stat`. Later versions may know more. */
enum rdmasock_why {
    RDMASOCK_WHY_NONE = 0,
    RDMASOCK_WHY_BELOW_THRESHOLD = 1,
    RDMASOCK_WHY_HANDSHAKE = 2,
    RDMASOCK_WHY_PEER_WITHOUT = 3,
    RDMASOCK_WHY_RULE = 4,
    RDMASOCK_WHY_DISABLED = 5,
    RDMASOCK_WHY_INHERITED = 6,
    RDMASOCK_WHY_DECLINED = 7,
    RDMASOCK_WHY_NO_MATCH = 8,
    RDMASOCK_WHY_TIMED_OUT = 9,
    RDMASOCK_WHY_ARENA_FULL = 10,
    RDMASOCK_WHY_LINK_LIMIT = 11,
    RDMASOCK_WHY_LINK_FAILED = 12,
    RDMASOCK_WHY_UNKNOWN_EPOLL = 13,
    RDMASOCK_WHY_OUT_OF_BAND = 14,
    RDMASOCK_WHY_KERNEL_TLS = 15,
    RDMASOCK_WHY_ZERO_COPY = 16,
    RDMASOCK_WHY_SPLICE = 17,
    RDMASOCK_WHY_STDIO = 18,
    RDMASOCK_WHY_EXEC = 19,
    RDMASOCK_WHY_PASSED = 20,
    RDMASOCK_WHY_OTHER_PROCESS = 21,
    RDMASOCK_WHY_CLOSED = 22,
    RDMASOCK_WHY_UNSUPPORTED = 23,
    RDMASOCK_WHY_PEER_ASKED = 24,
    RDMASOCK_WHY_VIOLATION = 25,
    RDMASOCK_WHY_VERSION = 26,
    RDMASOCK_WHY_NOT_TRUSTED = 27,
    RDMASOCK_WHY_RESOURCES = 28,
    RDMASOCK_WHY_PEER_GONE = 29,
    RDMASOCK_WHY_OTHER_HOST = 30,
    RDMASOCK_WHY_LINK_SILENT = 31,
    RDMASOCK_WHY_IO_URING = 32,
    RDMASOCK_WHY_NO_RULES = 33,
    RDMASOCK_WHY_CONFINED = 34,
    RDMASOCK_WHY_DEEP_BIND = 35,
    RDMASOCK_WHY_UNSEEN = 36,
    RDMASOCK_WHY_ASKED = 37,
    RDMASOCK_WHY_NOT_OWNER = 38,
    RDMASOCK_WHY_ALONE = 39
};

/*
 * One end of a connection. `size` is set by the caller, to sizeof(struct rdmasock_info), and by the library to the
 * bytes that it has filled; what is beyond them is zero. Later versions add members at the end.
 */
struct rdmasock_info {
    uint32_t size;
    uint32_t sends_by;    /* enum rdmasock_way */
    uint32_t receives_by; /* enum rdmasock_way */
    uint32_t why;         /* enum rdmasock_why; RDMASOCK_WHY_NONE where neither direction is on TCP */
    uint32_t peer_why;    /* with RDMASOCK_WHY_DECLINED, what the peer gave */
    uint32_t reserved;    /* 0 */
    /* Bytes of the program, by way, since this process has the connection. */
    uint64_t sent[RDMASOCK_WAYS];
    uint64_t received[RDMASOCK_WAYS];
    /* Of those by RDMA, what the device has moved past the rings (RDMASOCK_ZCOPY_MIN). */
    uint64_t sent_directly;
    uint64_t received_directly;
    /* `why` as `rdmasock stat` says it, ended by a zero byte; empty with RDMASOCK_WHY_NONE. */
    char why_text[128];
};

/* The function of the library with this name, or a null pointer; `cell` keeps what was found. */
static inline void *rdmasock_find_(void **cell, const char *name)
{
    void *found = __atomic_load_n(cell, __ATOMIC_ACQUIRE);
    if (!found) {
#ifdef RTLD_DEFAULT
        found = dlsym(RTLD_DEFAULT, name);
#else
        found = dlsym((void *)0, name); /* glibc declares it with _GNU_SOURCE only */
#endif
        /* The address of the cell itself: there is none, and nobody need look again. */
        __atomic_store_n(cell, found ? found : (void *)cell, __ATOMIC_RELEASE);
    }
    return found == (void *)cell ? (void *)0 : found;
}

/* Calls the library's function `name`, of the type `type`; ENOSYS where there is none. */
#define RDMASOCK_CALL_(type, name, arguments)                                                                          \
    do {                                                                                                               \
        static void *cell;                                                                                             \
        void *found = rdmasock_find_(&cell, name);                                                                     \
        type function;                                                                                                 \
        if (!found) {                                                                                                  \
            errno = ENOSYS;                                                                                            \
            return -1;                                                                                                 \
        }                                                                                                              \
        memcpy(&function, &found, sizeof function);                                                                    \
        return function arguments;                                                                                     \
    } while (0)

/*
 * Says what the connection `fd` runs on, and what it has carried. 0, or -1 with errno: EBADF, ENOTSOCK; EOPNOTSUPP, not
 * a TCP socket; ENOTCONN, it listens or was never connected; EINVAL, `size` is too small; EFAULT; ENOSYS.
 */
typedef int (*rdmasock_info_function_)(int, struct rdmasock_info *);
static inline int rdmasock_info(int fd, struct rdmasock_info *info)
{
    RDMASOCK_CALL_(rdmasock_info_function_, "rdmasock_info", (fd, info));
}

/*
 * Says what the connection `fd` is to run on. RDMASOCK_TCP: TCP for good, where it goes back to if it is on a link.
 * RDMASOCK_LINK: at the end that has connected, a link as soon as can be, whatever RDMASOCK_PROMOTE_AFTER says. Neither
 * is waited for. Also before connect(); of a listener, RDMASOCK_TCP is of all that is accepted from then on, until
 * RDMASOCK_LINK. 0, or -1 with errno: EBADF, ENOTSOCK; EOPNOTSUPP, not a TCP socket, or for RDMASOCK_LINK one that stays
 * on TCP for good; EINVAL, another way; ENOSYS.
 */
typedef int (*rdmasock_prefer_function_)(int, int);
static inline int rdmasock_prefer(int fd, int way)
{
    RDMASOCK_CALL_(rdmasock_prefer_function_, "rdmasock_prefer", (fd, way));
}

/*
 * Receives without a copy: says where the next bytes lie that a link has brought, in up to `*count` pieces (there are
 * never more than two), sets `*count` to how many there are, and returns their bytes. Waits for the first byte as recv()
 * does: `flags` is 0 or MSG_DONTWAIT. 0 at the end of the stream, -1 with errno: EOPNOTSUPP, TCP has what comes next, or
 * it is not a TCP socket: recv() says what it is; those of recv(); EINVAL, `*count` is less than 1, or another flag;
 * EFAULT; ENOSYS.
 *
 * Nothing is taken: until it is released or received it is what a call gives next. The bytes are to be read only, and
 * can be until they are released or received, or the last number of the socket is closed; only in this process. A peer
 * on this host can still write there, which is against the protocol: take a copy of what is checked and then used.
 */
typedef ssize_t (*rdmasock_view_function_)(int, struct iovec *, int *, int);
static inline ssize_t rdmasock_view(int fd, struct iovec *pieces, int *count, int flags)
{
    RDMASOCK_CALL_(rdmasock_view_function_, "rdmasock_view", (fd, pieces, count, flags));
}

/*
 * The program is done with the first `n` bytes of its view: they are received. The rest stays where it is. 0, or -1 with
 * errno, and nothing is released: EINVAL, the view has less than `n` bytes; ECANCELED, the view is over, because the
 * connection had to go back to TCP with what is unread: what was not released comes again by recv(); EBADF, ENOTSOCK;
 * ENOSYS.
 */
typedef int (*rdmasock_release_function_)(int, size_t);
static inline int rdmasock_release(int fd, size_t n)
{
    RDMASOCK_CALL_(rdmasock_release_function_, "rdmasock_release", (fd, n));
}

#ifdef __cplusplus
}
#endif

#endif
