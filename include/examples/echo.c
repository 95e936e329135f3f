/*
 * An echo server that sends back what it has received from where that lies, without a copy of its own, where the
 * connection is on a link; and as any other server does where it is on TCP, or there is no rdmasock.
 *
 *     cc -I include -o echo include/examples/echo.c
 *     rdmasock run -- ./echo 7777
 *
 * echo PORT [CONNECTIONS]: serves so many connections, one after the other (for ever), and says of each what came and
 * how. With PORT 0 it listens on any; it says on which.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "rdmasock.h"

/* Sends all of it. -1 on an error. */
static int send_all(int fd, const char *bytes, size_t len)
{
    while (len > 0) {
        ssize_t n = send(fd, bytes, len, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        bytes += n;
        len -= (size_t)n;
    }
    return 0;
}

/* Sends back the next bytes, whose number it gives; 0 at the end, -1 on an error. `viewed` counts those of a view. */
static ssize_t echo_some(int fd, unsigned long long *viewed)
{
    static char buf[65536];
    struct iovec pieces[2];
    int count = 2;
    ssize_t n = rdmasock_view(fd, pieces, &count, 0);

    if (n > 0) {
        for (int i = 0; i < count; i++)
            if (send_all(fd, (const char *)pieces[i].iov_base, pieces[i].iov_len) < 0)
                return -1;
        /* Nothing here passes the socket on or uses it in a child, so it does not lose its view (ECANCELED). */
        if (rdmasock_release(fd, (size_t)n) < 0)
            return -1;
        *viewed += (unsigned long long)n;
        return n;
    }
    /* Now on TCP, or without the library: any call may be the first or the last that it is so. */
    if (n < 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
        n = recv(fd, buf, sizeof buf, 0);
        if (n > 0 && send_all(fd, buf, (size_t)n) < 0)
            return -1;
    }
    return n < 0 && errno == EINTR ? echo_some(fd, viewed) : n;
}

static void serve(int fd)
{
    unsigned long long all = 0, viewed = 0;
    struct rdmasock_info info;
    ssize_t n;

    while ((n = echo_some(fd, &viewed)) > 0)
        all += (unsigned long long)n;
    if (n < 0)
        perror("echo");
    printf("%llu bytes, %llu of them where they lay", all, viewed);
    info.size = sizeof info;
    if (rdmasock_info(fd, &info) == 0)
        printf("; %llu came by TCP", (unsigned long long)info.received[RDMASOCK_TCP]);
    printf("\n");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {0};
    socklen_t len = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    long left = argc > 2 ? atol(argv[2]) : -1;

    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons((unsigned short)(argc > 1 ? atoi(argv[1]) : 0));
    if (bind(listener, (struct sockaddr *)&at, sizeof at) < 0 || listen(listener, 64) < 0 ||
        getsockname(listener, (struct sockaddr *)&at, &len) < 0) {
        perror("echo");
        return 1;
    }
    printf("port %d\n", ntohs(at.sin_port));
    fflush(stdout);
    for (; left != 0; left -= left > 0) {
        int fd = accept(listener, NULL, NULL);
        if (fd >= 0) {
            serve(fd);
            close(fd);
        }
    }
    return 0;
}
