//! Counts the instructions and system calls of an emulated machine of the lab, between two marks that a program in it
//! executes (`marks.rs`). It is a plugin of qemu's translator, for `scripts/bench-lab --costs`. The counts are exact,
//! except that a block which a fault ends half-way counts as whole. They cover the machine, so only one program should
//! run.
//!
//! `-plugin liblab_counter.so,out=FILE` adds a line to FILE at each end mark. The line has the counts since the last
//! begin mark: instructions in user space, instructions of the kernel, and system calls. The machine must have one
//! processor, as qemu adds without atomics.
//!
//! Source: qemu's `include/qemu/qemu-plugin.h`, version 1 of its interface (qemu 4.2 to 9.0).

mod marks;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// The version of the interface that this plugin is written for. qemu reports and refuses other versions.
#[unsafe(no_mangle)]
pub static qemu_plugin_version: c_int = 1;

/// A block that is being translated.
#[repr(C)]
pub struct Block([u8; 0]);
/// An instruction in a [`Block`].
#[repr(C)]
pub struct Instruction([u8; 0]);

type OnTranslation = extern "C" fn(id: u64, block: *mut Block);
type OnInstruction = extern "C" fn(processor: c_uint, data: *mut c_void);

/// `QEMU_PLUGIN_INLINE_ADD_U64`.
const ADD: c_int = 0;
/// `QEMU_PLUGIN_CB_NO_REGS`.
const NO_REGISTERS: c_int = 0;

unsafe extern "C" {
    fn qemu_plugin_register_vcpu_tb_trans_cb(id: u64, call: OnTranslation);
    fn qemu_plugin_tb_n_insns(block: *const Block) -> usize;
    fn qemu_plugin_tb_vaddr(block: *const Block) -> u64;
    fn qemu_plugin_tb_get_insn(block: *const Block, index: usize) -> *mut Instruction;
    fn qemu_plugin_insn_data(instruction: *const Instruction) -> *const u8;
    fn qemu_plugin_insn_size(instruction: *const Instruction) -> usize;
    fn qemu_plugin_register_vcpu_tb_exec_inline(block: *mut Block, operation: c_int, target: *mut c_void, operand: u64);
    fn qemu_plugin_register_vcpu_insn_exec_inline(
        instruction: *mut Instruction,
        operation: c_int,
        target: *mut c_void,
        operand: u64,
    );
    fn qemu_plugin_register_vcpu_insn_exec_cb(
        instruction: *mut Instruction,
        call: OnInstruction,
        flags: c_int,
        data: *mut c_void,
    );
}

/// Instructions in user space, instructions of the kernel and system calls, all since the machine was started.
/// Translated code adds to these counters.
static COUNTED: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
const USER: usize = 0;
const KERNEL: usize = 1;
const CALLS: usize = 2;
/// The values of [`COUNTED`] at the last begin mark.
static BEGUN: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
static OUT: OnceLock<File> = OnceLock::new();

fn counter(which: usize) -> *mut c_void {
    COUNTED[which].as_ptr().cast()
}

extern "C" fn begin(_processor: c_uint, _data: *mut c_void) {
    for (begun, counted) in BEGUN.iter().zip(&COUNTED) {
        begun.store(counted.load(Relaxed), Relaxed);
    }
}

extern "C" fn end(_processor: c_uint, _data: *mut c_void) {
    let [user, kernel, calls] =
        [USER, KERNEL, CALLS].map(|which| COUNTED[which].load(Relaxed) - BEGUN[which].load(Relaxed));
    if let Some(mut out) = OUT.get()
        && let Err(error) = writeln!(out, "{user} {kernel} {calls}")
    {
        eprintln!("lab-counter: {error}");
    }
}

extern "C" fn translated(_id: u64, block: *mut Block) {
    // SAFETY: qemu keeps the block and its instructions alive during this call; the counters are static.
    unsafe {
        let count = qemu_plugin_tb_n_insns(block);
        // The kernel's addresses are the upper half, and a block lies in one half.
        let is_user = qemu_plugin_tb_vaddr(block) >> 63 == 0;
        let side = if is_user { USER } else { KERNEL };
        qemu_plugin_register_vcpu_tb_exec_inline(block, ADD, counter(side), count as u64);
        if !is_user {
            return;
        }
        for index in 0..count {
            let instruction = qemu_plugin_tb_get_insn(block, index);
            let (data, size) = (qemu_plugin_insn_data(instruction), qemu_plugin_insn_size(instruction));
            match std::slice::from_raw_parts(data, size) {
                // The encoding of `syscall`.
                [0x0f, 0x05] => qemu_plugin_register_vcpu_insn_exec_inline(instruction, ADD, counter(CALLS), 1),
                [nop @ .., d0, d1, d2, d3] if *nop == marks::NOP => {
                    let call: OnInstruction = match i32::from_le_bytes([*d0, *d1, *d2, *d3]) {
                        marks::BEGIN => begin,
                        marks::END => end,
                        _ => continue,
                    };
                    qemu_plugin_register_vcpu_insn_exec_cb(instruction, call, NO_REGISTERS, std::ptr::null_mut());
                }
                _ => {}
            }
        }
    }
}

/// Installs the plugin. qemu calls this function once, with the plugin's options as NAME=VALUE. Any result but 0 stops
/// qemu.
///
/// # Safety
/// `options` are `count` C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: u64,
    _machine: *const c_void,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the caller passes `count` C strings.
        let option = unsafe { CStr::from_ptr(*options.add(index)) };
        let Some(path) = option.to_str().ok().and_then(|option| option.strip_prefix("out=")) else {
            eprintln!("lab-counter: unknown option {option:?}; it takes out=FILE");
            return 1;
        };
        match File::create(path) {
            Ok(file) => drop(OUT.set(file)),
            Err(error) => {
                eprintln!("lab-counter: {path}: {error}");
                return 1;
            }
        }
    }
    if OUT.get().is_none() {
        eprintln!("lab-counter: out=FILE is missing");
        return 1;
    }
    // SAFETY: qemu passed this plugin's id, and the function is never unloaded.
    unsafe { qemu_plugin_register_vcpu_tb_trans_cb(id, translated) };
    0
}
