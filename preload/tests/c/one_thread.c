/* Sends requests to a server without the library, at the given port, on three connections. Then prints the number of
 * threads of this process. */
#include <arpa/inet.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    char bytes[8] = "request";
    if (argc != 2)
        return 2;
    server.sin_port = htons(atoi(argv[1]));
    for (int connection = 0; connection < 3; connection++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&server, sizeof server))
            return 3;
        /* More requests than the threshold, so that the library checks whether the server has the library. */
        for (int request = 0; request < 40; request++)
            if (send(fd, bytes, sizeof bytes, 0) != sizeof bytes
                || recv(fd, bytes, sizeof bytes, MSG_WAITALL) != sizeof bytes)
                return 4;
    }
    DIR *tasks = opendir("/proc/self/task");
    int threads = 0;
    for (struct dirent *entry; tasks && (entry = readdir(tasks));)
        threads += entry->d_name[0] != '.';
    printf("%d\n", threads);
    return 0;
}
