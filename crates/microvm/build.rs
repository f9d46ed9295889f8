//! Builds the guest program, which is then part of the VMM: `cargo build` alone gives a machine
//! that runs something.
//!
//! The guest is for the bare machine but needs no target of its own: the ordinary toolchain's
//! `core` and a linker script do. It is compiled by `rustc` itself, since cargo knows no binary for
//! the machine below the one it builds for.

use std::path::Path;
use std::process::Command;

fn main() {
    let crate_dir = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let out = Path::new(&std::env::var("OUT_DIR").expect("cargo sets it")).join("microvm-guest");
    let guest = Path::new(&crate_dir).join("guest");
    for watched in ["guest", "src/boot_block.rs", "../stamp/src"] {
        println!("cargo:rerun-if-changed={watched}");
    }
    let script = guest.join("link.ld");
    let status = Command::new(std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned()))
        .arg(guest.join("main.rs"))
        .args(["--edition", "2024", "--crate-name", "microvm_guest", "--crate-type", "bin"])
        .args(["--target", "x86_64-unknown-linux-gnu"])
        .args(["-C", "panic=abort", "-C", "opt-level=3", "-C", "codegen-units=1"])
        .args(["-C", "relocation-model=static", "-C", "strip=symbols"])
        .args([
            "-C",
            "link-arg=-nostdlib",
            "-C",
            "link-arg=-nostartfiles",
            "-C",
            "link-arg=-static",
        ])
        .args(["-C", "link-arg=-Wl,--build-id=none", "-C", "link-arg=-Wl,-z,norelro", "-C"])
        .arg(format!("link-arg=-Wl,-T,{}", script.display()))
        .arg("-o")
        .arg(&out)
        // Flags meant for the program around it, such as those of a sanitizer, have no place in the
        // guest.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()
        .expect("rustc runs, cargo has just used it");
    assert!(status.success(), "the microvm's guest program does not build");
}
