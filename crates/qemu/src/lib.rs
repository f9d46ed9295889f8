//! The QEMU adapter: everything godwit knows about QEMU, which is never patched nor linked.
//!
//! QEMU is driven through its monitor (QMP) and watched through `/proc`.

#![forbid(unsafe_code)]

pub mod qmp;
