// Executes itself by each exec and spawn function, with an environment of one variable. Each new program prints whether
// the library is loaded, whether it began with the library's variable RDMASOCK_SPIN_US, and all entries of its
// environment. With the variable SOCKET the first program makes a TCP socket before all that.
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef AT_EMPTY_PATH
#define AT_EMPTY_PATH 0x1000
#endif

static char *self, *lone[] = {"ALONE=1", NULL}, *own[] = {"LD_PRELOAD=", NULL}, *args[] = {"environment", "", NULL};

static int has(const char *path, const char *text)
{
    static char all[1 << 20];
    FILE *file = fopen(path, "r");
    size_t n = fread(all, 1, sizeof all, file);
    fclose(file);
    return memmem(all, n, text, strlen(text)) != NULL;
}

static void way(int which)
{
    int fd = open(self, O_RDONLY);
    pid_t pid = 0;
    switch (which) {
    case 0: execve(self, args, lone); break;
    case 1: execle(self, "environment", args[1], (char *)NULL, lone); break;
    case 2: execvpe(self, args, lone); break;
    case 3: fexecve(fd, args, lone); break;
    case 4: execveat(fd, "", args, lone, AT_EMPTY_PATH); break;
    case 5: clearenv(); execv(self, args); break;
    case 6: clearenv(); execlp(self, "environment", args[1], (char *)NULL); break;
    case 7: if (posix_spawn(&pid, self, NULL, NULL, args, lone)) _exit(1); break;
    case 8: if (posix_spawnp(&pid, self, NULL, NULL, args, lone)) _exit(1); break;
    case 9: pid = vfork(); if (!pid) { execve(self, args, lone); _exit(1); } break;
    case 10: execve(self, args, own); break;
    case 11: unlink(getenv("LIBRARY")); execve(self, args, lone); break;
    }
    if (pid > 0) { int status; waitpid(pid, &status, 0); _exit(status != 0); }
    _exit(2);
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        printf("%s: %s %s", argv[1], has("/proc/self/maps", "/librdmasock.so") ? "kept" : "none",
               has("/proc/self/environ", "RDMASOCK_SPIN_US=7") ? "7" : "-");
        for (char **entry = environ; *entry; entry++)
            printf(" %s", *entry);
        puts("");
        return 0;
    }
    self = realpath(argv[0], NULL);
    if (getenv("SOCKET"))
        close(socket(AF_INET, SOCK_STREAM, 0));
    for (int which = 0; which < 12; which++) {
        char word[8];
        sprintf(word, "%d", which);
        args[1] = word;
        fflush(stdout);
        pid_t pid = fork();
        if (!pid)
            way(which);
        int status;
        if (waitpid(pid, &status, 0) != pid || status)
            return printf("%d: status %x\n", which, status), 1;
    }
    return 0;
}
