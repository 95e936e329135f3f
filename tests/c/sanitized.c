/* One end of a connection, for a sanitizer: built by `gcc -fsanitize=address`. Without an argument it is the server, which prints its port and sends back
 * each message. With a port it is the client: it has 1,000 messages sent back, and more until its standard input ends. */
#include "common.h"

#define SIZE 200
#define MESSAGES 1000

static struct sockaddr_in at(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return to;
}

/* Receives a whole message; false at the end of the stream. */
static int get(int fd, char *message)
{
    size_t got = 0;
    while (got < SIZE) {
        ssize_t n = MUST(recv(fd, message + got, SIZE - got, 0));
        if (n == 0)
            return 0;
        got += n;
    }
    return 1;
}

static int serve(void)
{
    struct sockaddr_in here = at(0);
    socklen_t length = sizeof here;
    int listener = MUST(socket(AF_INET, SOCK_STREAM, 0));
    MUST(bind(listener, (struct sockaddr *)&here, sizeof here));
    MUST(listen(listener, 1));
    MUST(getsockname(listener, (struct sockaddr *)&here, &length));
    printf("%d\n", ntohs(here.sin_port));
    fflush(stdout);
    int fd = MUST(accept(listener, NULL, NULL));
    char *message = malloc(SIZE);
    while (get(fd, message))
        CHECK(send(fd, message, SIZE, 0) == SIZE);
    free(message);
    MUST(close(fd));
    return 0;
}

static int ask(int port)
{
    struct sockaddr_in there = at(port);
    int fd = MUST(socket(AF_INET, SOCK_STREAM, 0));
    MUST(connect(fd, (struct sockaddr *)&there, sizeof there));
    struct pollfd input = {.fd = 0, .events = POLLIN};
    for (int n = 0; n < MESSAGES || poll(&input, 1, 1) == 0; n++) {
        char *message = malloc(SIZE), *answer = malloc(SIZE);
        memset(message, n, SIZE);
        CHECK(send(fd, message, SIZE, 0) == SIZE);
        CHECK(get(fd, answer));
        CHECK(memcmp(message, answer, SIZE) == 0);
        free(message);
        free(answer);
    }
    MUST(close(fd));
    return 0;
}

int main(int argc, char **argv)
{
    return argc > 1 ? ask(atoi(argv[1])) : serve();
}
