/* Opens a library by its bare name. The library lies in the RUNPATH of this program. libc searches the RUNPATH of the
 * caller of dlopen, which it finds by the return address. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
    void *found = dlopen("librunpath_found.so", RTLD_NOW);
    void *deep = dlopen("librunpath_deep.so", RTLD_NOW | RTLD_DEEPBIND);
    void *absent = dlopen("librunpath_absent.so", RTLD_NOW);
    void *itself = dlopen(NULL, RTLD_NOW);
    printf("%d %d %d %d\n", found != NULL, deep != NULL, absent != NULL, itself != NULL);
    return 0;
}
