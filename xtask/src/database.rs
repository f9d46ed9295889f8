//! `make guest-database`: the memory of a running Linux guest with a database loaded, as a file,
//! for `godwit bench codecs`.
//!
//! Debian's SQLite and busybox are unpacked, never installed, into an initramfs of their own. The
//! guest fills a database on its tmpfs (customers, orders, two indexes), says so, and is stopped;
//! its RAM file is what remains.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail, ensure};

use crate::apt::Apt;
use crate::cpio::Archive;

const PACKAGES: [&str; 7] =
    ["busybox-static", "sqlite3", "libsqlite3-0", "libreadline8", "libtinfo6", "zlib1g", "libc6"];
/// Which of their files go into the image, by the beginnings of their names, and where to.
const FILES: [(&str, &str); 8] = [
    ("busybox", "bin"),
    ("sqlite3", "bin"),
    ("libsqlite3.so.0", "lib"),
    ("libreadline.so.8", "lib"),
    ("libtinfo.so.6", "lib"),
    ("libz.so.1", "lib"),
    ("libc.so.6", "lib"),
    ("libm.so.6", "lib"),
];
const LOADER: &str = "ld-linux-x86-64.so.2";
const READY: &str = "DATABASE READY";
const MEMORY: &str = "1024M";
const INIT: &str = "#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t tmpfs -o size=90% tmpfs /data
export LD_LIBRARY_PATH=/lib
/bin/sqlite3 /data/shop.db < /fill.sql && echo DATABASE READY
while :; do /bin/busybox sleep 1000; done
";
const FILL: &str = "pragma journal_mode = off; pragma synchronous = off; pragma cache_size = -65536;
create table word(n integer primary key, text);
insert into word select value, text from (select row_number() over () - 1 as value, a || b as text from
  (select column1 as a from (values ('Nor'),('Süd'),('West'),('Ost'),('Alt'),('Neu'),('Groß'),('Klein'),('Ober'),('Unter'),('Ha'),('Ber'),('Mar'),('Lin'),('Ste'),('Kai'))),
  (select column1 as b from (values ('berg'),('dorf'),('heim'),('stadt'),('bach'),('feld'),('au'),('ing'),('see'),('wald'),('burg'),('hof'),('mann'),('sen'),('ner'),('ke'))));
create table customer(id integer primary key, name, street, city, phone, balance real, since);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 900000)
  insert into customer select i, (select text from word where n = abs(random()) % 256) || ' ' || (select text from word where n = abs(random()) % 256),
  (select text from word where n = abs(random()) % 256) || 'straße ' || abs(random()) % 200, (select text from word where n = abs(random()) % 256),
  '+49 ' || abs(random()) % 10000000000, (random() % 1000000) / 100.0, date('2001-01-01', abs(random()) % 9000 || ' days') from n;
create table sale(id integer primary key, customer integer, article integer, pieces integer, price real, at, note);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 2500000)
  insert into sale select i, abs(random()) % 900000, abs(random()) % 40000, abs(random()) % 20 + 1, (abs(random()) % 100000) / 100.0,
  datetime('2024-01-01', abs(random()) % 60000000 || ' seconds'), hex(randomblob(6)) from n;
create index customer_name on customer(name);
create index sale_customer on sale(customer, at);
select count(*), sum(price) from sale;
";

/// Makes target/guest/database.ram; needs `make guest qemu`.
pub(crate) fn dump() -> anyhow::Result<()> {
    let dir = crate::target_dir().join("guest");
    let (kernel, ram) = (dir.join("vmlinuz"), dir.join("database.ram"));
    ensure!(kernel.exists(), "{} is missing: run `make guest qemu` first", kernel.display());
    let work = crate::target_dir().join("guest-database");
    let initramfs = work.join("initramfs.cpio");
    std::fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    std::fs::write(&initramfs, image(&work)?)?;
    println!("the guest fills its database; under emulation that takes minutes");
    let file = PathBuf::from(format!("/dev/shm/godwit-database-{}", std::process::id()));
    let mut guest = Guest { qemu: start(&kernel, &initramfs, &file)?, file };
    guest.wait()?;
    // The copy keeps its holes: what the guest never touched.
    let copied = Command::new("cp").arg("--sparse=always").args([&guest.file, &ram]).status()?;
    ensure!(copied.success(), "cannot copy the guest's memory to {}", ram.display());
    println!("{} made: godwit bench codecs {}", ram.display(), ram.display());
    Ok(())
}

struct Guest {
    qemu: Child,
    file: PathBuf,
}

impl Guest {
    fn wait(&mut self) -> anyhow::Result<()> {
        let console = self.qemu.stdout.take().context("QEMU has no standard output")?;
        for line in BufReader::new(console).lines() {
            let line = line?;
            println!("  {line}");
            if line.starts_with(READY) {
                return Ok(());
            }
        }
        bail!("the guest ended before its database was filled")
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        let _ = std::fs::remove_file(&self.file);
    }
}

fn start(kernel: &Path, initramfs: &Path, file: &Path) -> anyhow::Result<Child> {
    let backend =
        format!("memory-backend-file,id=mem,size={MEMORY},share=on,mem-path={}", file.display());
    Command::new("qemu-system-x86_64")
        .args([
            "-accel",
            "tcg",
            "-machine",
            "q35,memory-backend=mem",
            "-m",
            MEMORY,
            "-object",
            &backend,
        ])
        .args(["-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio", "-kernel"])
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs)
        .args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start qemu-system-x86_64: run `make qemu`")
}

fn image(work: &Path) -> anyhow::Result<Vec<u8>> {
    let root = Apt::default().unpacked(&PACKAGES, &work.join("packages"))?;
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "data", "bin", "lib", "lib64"] {
        archive.directory(directory);
    }
    archive.character_device("dev/console", 5, 1);
    archive.program("init", INIT.as_bytes());
    archive.program("fill.sql", FILL.as_bytes());
    for (name, into) in FILES.into_iter().chain([(LOADER, "lib64")]) {
        let found = find(&root, name)?.with_context(|| format!("no package has {name}"))?;
        archive.program(&format!("{into}/{name}"), &std::fs::read(found)?);
    }
    Ok(archive.finish())
}

/// The program or library `name` below `dir`; symbolic links are followed when it is read.
pub(crate) fn find(dir: &Path, name: &str) -> anyhow::Result<Option<PathBuf>> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if let Some(found) = find(&path, name)? {
                return Ok(Some(found));
            }
        } else if entry.file_name() == name
            && std::fs::read(&path).is_ok_and(|b| b.starts_with(b"\x7fELF"))
        {
            return Ok(Some(path));
        }
    }
    Ok(None)
}
