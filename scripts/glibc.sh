# Shared by scripts/check-exports and scripts/check-plugin (sourced): the oldest glibc that a library may need.

# newer_than_oldest LIB: the references of a library that glibc 2.17 does not have, one a line.
# A reference without a version is looked up by name alone, and must be weak: glibc 2.17 may lack it.
newer_than_oldest() {
    nm -D --undefined-only "$1" | awk '
        $2 ~ /@GLIBC_/ { split($2, part, /@GLIBC_2\./); if (part[2] + 0 > 17) print $2 }
        $2 !~ /@/ && $1 != "w" { print $2 }'
}

# needs_oldest SCRIPT LIB: fails, and says why, if the library needs more than glibc 2.17.
needs_oldest() {
    newer=$(newer_than_oldest "$2")
    if [ -n "$newer" ]; then
        printf '%s: %s needs more than glibc 2.17 (preload/build.rs):\n%s\n' "$1" "$2" "$newer" >&2
        return 1
    fi
}
