//! Sets the library's allocator to `rdmasock_core::os::heap`. A hook may have interrupted the program's `malloc`, and
//! the program may have replaced it.

#[global_allocator]
static HEAP: rdmasock_core::os::heap::Heap = rdmasock_core::os::heap::Heap::new();
