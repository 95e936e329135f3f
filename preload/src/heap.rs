//! Where the library's memory comes from: not the program's `malloc`, which a hook may have interrupted, and which may
//! be anybody's (`rdmasock_core::os::heap`).

#[cfg(target_arch = "x86_64")]
#[global_allocator]
static HEAP: rdmasock_core::os::heap::Heap = rdmasock_core::os::heap::Heap::new();
