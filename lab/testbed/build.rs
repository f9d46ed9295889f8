//! Builds the firmware of the guest that runs under QEMU on KVM.
//!
//! The ordinary toolchain's assembler and a linker script do. It is compiled by `rustc` itself,
//! since cargo knows no binary for the machine below the one it builds for.

use std::path::Path;
use std::process::Command;

fn main() {
    let crate_dir = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let out = Path::new(&std::env::var("OUT_DIR").expect("cargo sets it")).join("firmware");
    let firmware = Path::new(&crate_dir).join("firmware");
    println!("cargo:rerun-if-changed=firmware");
    let script = firmware.join("link.ld");
    let status = Command::new(std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned()))
        .arg(firmware.join("main.rs"))
        .args(["--edition", "2024", "--crate-name", "firmware", "--crate-type", "bin"])
        .args(["--target", "x86_64-unknown-linux-gnu", "-C", "panic=abort", "-C", "opt-level=3"])
        .args(["-C", "relocation-model=static", "-C", "link-arg=-nostdlib"])
        .args(["-C", "link-arg=-nostartfiles", "-C", "link-arg=-static"])
        .args(["-C", "link-arg=-Wl,--build-id=none", "-C"])
        .arg(format!("link-arg=-Wl,-T,{}", script.display()))
        .arg("-o")
        .arg(&out)
        // Flags meant for the program around it have no place in it.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()
        .expect("rustc runs, cargo has just used it");
    assert!(status.success(), "the firmware does not build");
}
