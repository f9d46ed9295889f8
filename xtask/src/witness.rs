//! `make witnesses`: guests in which a program that is not ours does its own work and its own
//! checks beside the stamps, each an initramfs for the kernel of `make guest`.
//!
//! Keeps two promises: nothing is installed (programs and their libraries are unpacked from
//! Debian's packages); and what a program needs is found by the loader of the C library that goes
//! with it, so a library that is missing is told here and not in the guest. What the programs do
//! is in lab/testbed/witnesses.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::apt::{self, Apt};
use crate::cpio::Archive;
use crate::database::find;
use crate::guest;

const INIT: &str = include_str!("../../lab/testbed/witnesses/init");
const LOADER: &str = "ld-linux-x86-64.so.2";
/// Where packages have libraries.
const LIBRARIES: [&str; 3] =
    ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/ceph"];

/// A guest with a witness.
#[derive(Debug)]
struct Witness {
    name: &'static str,
    script: &'static str,
    /// Beside those that all need.
    packages: &'static [&'static str],
    /// Programs, by their names in the packages, and what they are called in the guest.
    programs: &'static [(&'static str, &'static str)],
    /// Other files, by their places in the packages, and where they go.
    files: &'static [(&'static str, &'static str)],
}

const WITNESSES: [Witness; 5] = [
    Witness {
        name: "sqlite",
        script: include_str!("../../lab/testbed/witnesses/sqlite"),
        packages: &["sqlite3", "libsqlite3-0", "libreadline8", "libtinfo6", "zlib1g"],
        programs: &[("sqlite3", "sqlite3")],
        files: &[],
    },
    Witness {
        name: "fio",
        script: include_str!("../../lab/testbed/witnesses/fio"),
        packages: &FIO,
        programs: &[("fio", "fio")],
        files: &[],
    },
    Witness {
        name: "stress",
        script: include_str!("../../lab/testbed/witnesses/stress"),
        packages: &STRESS,
        programs: &[("stress-ng", "stress-ng")],
        files: &[],
    },
    Witness {
        name: "compiler",
        script: include_str!("../../lab/testbed/witnesses/compiler"),
        packages: &["tcc", "libc6-dev"],
        programs: &[("tcc", "tcc")],
        files: &[
            ("usr/lib/x86_64-linux-gnu/crt1.o", "lib/crt1.o"),
            ("usr/lib/x86_64-linux-gnu/crti.o", "lib/crti.o"),
            ("usr/lib/x86_64-linux-gnu/crtn.o", "lib/crtn.o"),
        ],
    },
    Witness {
        name: "redis",
        script: include_str!("../../lab/testbed/witnesses/redis"),
        packages: &REDIS,
        programs: &[("redis-check-rdb", "redis-server")],
        files: &[],
    },
];

/// Of all of them.
const COMMON: [&str; 2] = ["busybox-static", "libc6"];

/// Debian's fio has all of its engines linked in, and so all that they need.
const FIO: [&str; 57] = [
    "fio",
    "libaio1",
    "libargon2-1",
    "libblkid1",
    "libboost-iostreams1.74.0",
    "libboost-thread1.74.0",
    "libbz2-1.0",
    "libcom-err2",
    "libcryptsetup12",
    "libdaxctl1",
    "libdevmapper1.02.1",
    "libffi8",
    "libfmt9",
    "libgcc-s1",
    "libgfapi0",
    "libgfrpc0",
    "libgfxdr0",
    "libglusterfs0",
    "libgmp10",
    "libgnutls30",
    "libgssapi-krb5-2",
    "libhogweed6",
    "libibverbs1",
    "libicu72",
    "libidn2-0",
    "libjson-c5",
    "libk5crypto3",
    "libkeyutils1",
    "libkmod2",
    "libkrb5-3",
    "libkrb5support0",
    "liblzma5",
    "libnbd0",
    "libndctl6",
    "libnettle8",
    "libnl-3-200",
    "libnl-route-3-200",
    "libnuma1",
    "libp11-kit0",
    "libpcre2-8-0",
    "libpmem1",
    "libpmemblk1",
    "librados2",
    "librbd1",
    "librdmacm1",
    "libselinux1",
    "libssl3",
    "libstdc++6",
    "libtasn1-6",
    "libtirpc3",
    "libudev1",
    "libunistring2",
    "libuuid1",
    "libxml2",
    "libzstd1",
    "libacl1",
    "zlib1g",
];
const STRESS: [&str; 23] = [
    "stress-ng",
    "libapparmor1",
    "libbsd0",
    "libcrypt1",
    "libdrm2",
    "libegl1",
    "libexpat1",
    "libffi8",
    "libgbm1",
    "libgles2",
    "libglvnd0",
    "libipsec-mb1",
    "libjpeg62-turbo",
    "libjudydebian1",
    "libkmod2",
    "liblzma5",
    "libmd0",
    "libsctp1",
    "libssl3",
    "libwayland-server0",
    "libxxhash0",
    "libzstd1",
    "zlib1g",
];
const REDIS: [&str; 14] = [
    "redis-tools",
    "libatomic1",
    "libjemalloc2",
    "liblzf1",
    "libssl3",
    "libsystemd0",
    "libcap2",
    "libgcrypt20",
    "libgpg-error0",
    "liblz4-1",
    "liblzma5",
    "libzstd1",
    "libstdc++6",
    "libgcc-s1",
];

/// Brings target/witnesses up to date; needs `make guest`.
pub(crate) fn build() -> anyhow::Result<()> {
    let modules = crate::target_dir().join("guest/modules");
    ensure!(modules.exists(), "{} is missing: run `make guest`", modules.display());
    let out = crate::target_dir().join("witnesses");
    std::fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let stamp = std::fs::read(guest::guest_program()?).context("cannot read the guest program")?;
    for witness in &WITNESSES {
        let image = witness.image(&stamp, &modules)?;
        let path = out.join(format!("{}.cpio", witness.name));
        if std::fs::read(&path).is_ok_and(|there| there == image) {
            println!("{} is up to date", path.display());
            continue;
        }
        std::fs::write(&path, &image)
            .with_context(|| format!("cannot write {}", path.display()))?;
        println!("{} made, {} KiB", path.display(), image.len() / 1024);
    }
    Ok(())
}

impl Witness {
    fn image(&self, stamp: &[u8], modules: &Path) -> anyhow::Result<Vec<u8>> {
        let work = crate::target_dir().join("witnesses-build").join(self.name);
        let packages = [&COMMON[..], self.packages].concat();
        let root = Apt::default().unpacked(&packages, &work)?;
        let mut archive = Archive::default();
        for directory in ["bin", "dev", "proc", "sys", "tmp", "data", "lib", "lib64"] {
            archive.directory(directory);
        }
        // The kernel opens this for init's standard streams before anything could be mounted.
        archive.character_device("dev/console", 5, 1);
        archive.program("init", INIT.as_bytes());
        archive.program("witness", self.script.as_bytes());
        archive.program("bin/godwit-stamp", stamp);
        archive.program("bin/busybox", &read(&root.join("bin/busybox"))?);
        let loader = self.find(&root, LOADER)?;
        archive.program(&format!("lib64/{LOADER}"), &read(&loader)?);
        let mut libraries = Vec::new();
        for (name, called) in self.programs {
            let program = self.find(&root, name)?;
            archive.program(&format!("bin/{called}"), &read(&program)?);
            libraries.extend(needed(&root, &loader, &program)?);
        }
        libraries.sort();
        libraries.dedup();
        for library in libraries {
            let name = library.file_name().context("a library without a name")?;
            let name = format!("lib/{}", name.to_string_lossy());
            archive.program(&name, &read(&library)?);
        }
        for (from, to) in self.files {
            archive.program(to, &read(&root.join(from))?);
        }
        guest::add_modules(&mut archive, modules)?;
        Ok(archive.finish())
    }

    fn find(&self, root: &Path, name: &str) -> anyhow::Result<PathBuf> {
        find(root, name)?.with_context(|| format!("no package of {} has {name}", self.name))
    }
}

/// The libraries that `program` loads, of those below `root`.
fn needed(root: &Path, loader: &Path, program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let path = LIBRARIES.map(|dir| root.join(dir).display().to_string()).join(":");
    let mut command = Command::new(loader);
    command.args(["--inhibit-cache", "--library-path", &path, "--list"]).arg(program);
    let listed = apt::output(&mut command)?;
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for line in listed.lines() {
        let Some((name, place)) = line.trim().split_once(" => ") else { continue };
        let place = Path::new(place.split(" (").next().unwrap_or(place));
        // One of this system is of another version in the guest, or of none.
        if place.starts_with(root) {
            found.push(place.to_owned());
        } else if name != format!("/lib64/{LOADER}") {
            missing.push(name);
        }
    }
    ensure!(
        missing.is_empty(),
        "{} needs {}, which none of its packages has: add theirs in xtask/src/witness.rs",
        program.display(),
        missing.join(", ")
    );
    Ok(found)
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
