/* Looks functions up by dlsym and dlvsym. With LIBRARY this file is a library that the loader searches before libc. Its
 * `send` calls the function that RTLD_NEXT finds. Without LIBRARY this file is the program. The output has to be the
 * same with and without hooks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#ifdef LIBRARY
int sent;

ssize_t send(int fd, const void *buf, size_t len, int flags)
{
    ssize_t (*next)(int, const void *, size_t, int) = dlsym(RTLD_NEXT, "send");
    sent++;
    return next == send ? -2 : next(fd, buf, len, flags);
}

/* Has the name of a libc function, but another purpose. */
int listen(int fd, int backlog) { return fd + backlog; }
#else
#define VERSION "GLIBC_2.2.5"

extern int sent;

int main(void)
{
    void *libc = dlopen("libc.so.6", RTLD_NOW), *library = dlopen(BESIDE, RTLD_NOW);
    const char *names[] = {"recv", "read", "close", "prctl", "syscall", "dlsym", "getpid", "nothing"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *by_default = dlsym(RTLD_DEFAULT, names[i]), *by_handle = dlsym(libc, names[i]);
        printf("%s: %d, by handle %d %d", names[i], by_default != NULL, by_handle == by_default, dlerror() == NULL);
        printf(", with version %d %d", dlvsym(libc, names[i], VERSION) == by_default, dlvsym(RTLD_DEFAULT, names[i], VERSION) == by_default);
        printf(", with a wrong one %d %d\n", dlvsym(libc, names[i], "NO_1") == NULL, dlvsym(RTLD_DEFAULT, names[i], "NO_1") == NULL);
    }
    printf("next %d %d\n", dlsym(RTLD_NEXT, "recv") == dlsym(RTLD_DEFAULT, "recv"), dlvsym(RTLD_NEXT, "recv", VERSION) == dlsym(RTLD_DEFAULT, "recv"));

    int (*other)(int, int) = dlsym(library, "listen");
    printf("another's %d\n", other(40, 2));
    int ends[2];
    char buf[8] = "";
    socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
    printf("send %zd", send(ends[0], "one", 3, 0));
    ssize_t (*by_handle)(int, void *, size_t, int) = dlsym(libc, "recv");
    printf(", recv %zd %s, seen on the way %d\n", by_handle(ends[1], buf, 7, 0), buf, sent);
    return 0;
}
#endif
