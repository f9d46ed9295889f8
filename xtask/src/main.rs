//! Build chores: the guest image, the QEMUs that tests, demo and benchmarks run it in, and the
//! godwit of the release before.
//!
//! Every chore is quick when there is nothing to do, says what it downloads or installs before it
//! does, and leaves the rest of the system as it was. Run through `make`; each answers to the
//! target of its name.

#![forbid(unsafe_code)]

mod apt;
mod book;
mod cpio;
mod database;
mod deb;
mod guest;
mod image;
mod nats;
mod previous;
mod qemu;
mod semver;
mod witness;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "usage: cargo run -p xtask -- CHORE
  guest   builds target/guest/vmlinuz and target/guest/initramfs.cpio
  guest-database  runs a guest that fills a database: its memory is target/guest/database.ram
  witnesses  makes target/witnesses: guests with a program and a check that are not ours
  stamp   builds target/stamp/godwit-stamp, a static program
  image   makes target/image: that program as kernel and initramfs, as an ISO, and for cloud images
  qemu    installs QEMU and its image tools if missing, and unpacks QEMU 10 and the newest
  qemu-for-demo  installs QEMU if missing, and unpacks QEMU 10
  nats    unpacks a NATS server into target/nats
  previous  builds the godwit of the release before: target/previous
  semver  compares what the crates meant for others offer with the release before
  book    makes target/book/html of the documents
  deb     makes the packages godwit and godwit-stamp, target/deb/NAME_VERSION_ARCHITECTURE.deb;
          --binary PATH, --stamp PATH for other builds' programs, --out DIR for another place";

fn main() -> ExitCode {
    let chore = std::env::args().nth(1).unwrap_or_default();
    let outcome = match chore.as_str() {
        "guest" => guest::build(),
        "guest-database" => database::dump(),
        "stamp" => guest::program(),
        "witnesses" => witness::build(),
        "image" => image::build(),
        "qemu" => qemu::provide(),
        "qemu-for-demo" => qemu::provide_for_demo(),
        "nats" => nats::provide(),
        "previous" => previous::provide(),
        "semver" => semver::compare(),
        "book" => book::build(),
        "deb" => deb::build(std::env::args().skip(2)),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("make {chore}: {problem:#}");
            ExitCode::FAILURE
        }
    }
}

/// The checkout.
fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// The workspace's own `target/`, whatever CARGO_TARGET_DIR says: the places in it are named in
/// documentation.
fn target_dir() -> PathBuf {
    top().join("target")
}

/// The cargo that runs this.
fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}
