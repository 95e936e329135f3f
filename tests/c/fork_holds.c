/* A connection that the parent uses, and that each child inherits: what children do that is no use of it (closing their
 * copy, ending, executing something else) leaves it where it is. Tells when it has used the connection enough, and goes on
 * when it is told to.
 */
#include "common.h"

static int fd;

static void use(int rounds)
{
    char out[512], in[512];
    for (int i = 0; i < rounds; i++) {
        memset(out, i, sizeof out);
        CHECK(put_all(fd, out, sizeof out) > 0);
        CHECK(get_all(fd, in, sizeof in) > 0);
        CHECK(memcmp(in, out, sizeof in) == 0);
    }
}

/* Lets the observer look. */
static void meet(const char *what)
{
    char line[16];
    printf("%s\n", what);
    for (;;) {
        struct pollfd input = {0, POLLIN, 0};
        if (poll(&input, 1, 1) > 0)
            break;
        use(1);
    }
    CHECK(fgets(line, sizeof line, stdin));
}

int main(void)
{
    struct sockaddr_in at;
    int status;
    setvbuf(stdout, NULL, _IONBF, 0);
    alarm(60);
    echo_process(&at);
    fd = connected(&at);
    use(100);
    meet("warm");
    for (int round = 0; round < 4; round++) {
        pid_t pid = MUST(fork());
        if (pid == 0) {
            char *const program[] = {"true", NULL};
            switch (round) {
            case 0:
                CHECK(close(fd) == 0);
                break;
            case 1:
                CHECK(close_range(3, ~0U, 0) == 0);
                break;
            case 2:
                MUST(dup2(0, fd));
                break;
            default:
                execv("/bin/true", program);
            }
            exit(0);
        }
        MUST(waitpid(pid, &status, 0));
        CHECK(status == 0);
        use(10);
    }
    meet("children have ended");
    use(10);
    printf("done\n");
    _exit(0);
}
