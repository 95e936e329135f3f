//! The library's constructor.

/// Called by the dynamic linker (ELF gABI, "Initialization and Termination Functions").
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = rdmasock_shims::hooks::on_load;
