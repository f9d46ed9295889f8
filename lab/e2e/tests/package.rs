//! The Debian packages: each installed into a root that has nothing but what it depends on, run
//! there, and removed.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, ensure};
use godwit_testbed::{Godwit, Room, skip};

/// What the package depends on.
const BELOW: [&str; 2] = ["libc6", "libgcc-s1"];
const UNIT: &str = "/usr/lib/systemd/system/godwit-receive@.service";
const DAEMON: &str = "/usr/lib/systemd/system/godwitd.service";
const DAEMON_SOCKET: &str = "/usr/lib/systemd/system/godwitd.socket";
const STAMP: &str = "/usr/lib/systemd/system/godwit-stamp.service";

fn run(command: &mut Command) -> anyhow::Result<Output> {
    command.output().with_context(|| format!("cannot run {command:?}"))
}

fn done(command: &mut Command) -> anyhow::Result<String> {
    let output = run(command)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {said}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

/// A root directory with the packages [`BELOW`], as far as this host has them, and dpkg's word for
/// it that they are installed.
fn clean_root(root: &Path) -> anyhow::Result<()> {
    for merged in ["bin", "sbin", "lib", "lib64"] {
        std::fs::create_dir_all(root.join("usr").join(merged))?;
        symlink(format!("usr/{merged}"), root.join(merged))?;
    }
    let mut installed = String::new();
    for package in BELOW {
        installed += &done(Command::new("dpkg-query").args(["-s", package]))?;
        installed.push('\n');
        for file in done(Command::new("dpkg-query").args(["-L", package]))?.lines() {
            let to = root.join(file.trim_start_matches('/'));
            let Ok(kind) = std::fs::symlink_metadata(file) else { continue };
            // Some are named twice, by way of /lib and of /usr/lib.
            if kind.is_dir() || to.symlink_metadata().is_ok() {
                continue;
            }
            std::fs::create_dir_all(to.parent().context("no directory")?)?;
            if kind.is_symlink() {
                symlink(std::fs::read_link(file)?, &to)?;
            } else {
                std::fs::copy(file, &to)?;
            }
        }
    }
    database(root, &installed)
}

/// What dpkg keeps below `root`, with the packages of `status`.
fn database(root: &Path, status: &str) -> anyhow::Result<()> {
    let database = root.join("var/lib/dpkg");
    std::fs::create_dir_all(database.join("info"))?;
    std::fs::create_dir_all(database.join("updates"))?;
    Ok(std::fs::write(database.join("status"), status)?)
}

fn dpkg(root: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("dpkg");
    command.arg(format!("--root={}", root.display())).arg("--log=/dev/null").args(words);
    command
}

/// What a package needs to be installed and run here; says what is missing.
fn is_possible(test: &str) -> bool {
    if Command::new("dpkg-deb").arg("--version").output().is_err() {
        skip(test, "this is not Debian or a relative of it");
        return false;
    }
    if !rustix::process::geteuid().is_root() {
        skip(test, "only root may change its root directory");
        return false;
    }
    true
}

/// Makes the packages of the godwit that is tested; the path of that whose name begins with `name`.
fn package(out: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let godwit = Godwit::built()?;
    let program = godwit.program();
    let xtask = program.parent().context("no directory")?.join("xtask");
    ensure!(xtask.exists(), "{} is missing: `cargo build -p xtask`", xtask.display());
    let mut make = Command::new(xtask);
    make.args(["deb", "--binary"]).arg(program).arg("--out").arg(out);
    let made = done(&mut make)?;
    let mut made = made.lines().map(PathBuf::from);
    let is_it = |path: &PathBuf| {
        path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name))
    };
    made.find(is_it).with_context(|| format!("no package {name}"))
}

/// The unit in `root` is one that systemd understands whole, and has it confined.
fn check_unit(test: &str, root: &Path) -> anyhow::Result<()> {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        skip(test, "there is no systemd-analyze: the unit was not looked at");
        return Ok(());
    }
    // An instance of it, since its name is that of a file of options.
    let unit = root.join("usr/lib/systemd/system/godwit-receive@test.service");
    let text = std::fs::read_to_string(root.join(&UNIT[1..]))?;
    let program = root.join("usr/bin/godwit");
    std::fs::write(&unit, text.replace("/usr/bin/godwit", &program.to_string_lossy()))?;
    let verified = run(Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .arg(&unit))?;
    let said = String::from_utf8_lossy(&verified.stderr);
    // Mutation: a setting with a slip of the pen, which systemd passes over with a warning.
    ensure!(verified.status.success() && !said.contains("godwit"), "{said}");
    let secure = run(Command::new("systemd-analyze")
        .args(["security", "--no-pager", "--offline=true", "--threshold=45"])
        .arg(&unit))?;
    let said = String::from_utf8_lossy(&secure.stdout);
    ensure!(secure.status.success(), "{said}");
    std::fs::remove_file(&unit)?;
    // That of the daemon, under another name, with the program that is in the root.
    let unit = root.join("usr/lib/systemd/system/daemon-test.service");
    let text = std::fs::read_to_string(root.join(&DAEMON[1..]))?;
    let program = root.join("usr/bin/godwitd");
    std::fs::write(&unit, text.replace("/usr/bin/godwitd", &program.to_string_lossy()))?;
    let verified = run(Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .arg(&unit))?;
    let said = String::from_utf8_lossy(&verified.stderr);
    ensure!(verified.status.success() && !said.contains("daemon-test"), "{said}");
    // With the socket that may be handed over to it.
    let socket = root.join("usr/lib/systemd/system/daemon-test.socket");
    std::fs::copy(root.join(&DAEMON_SOCKET[1..]), &socket)?;
    let verified = run(Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .arg(&socket))?;
    let said = String::from_utf8_lossy(&verified.stderr);
    ensure!(verified.status.success() && !said.contains("daemon-test"), "{said}");
    std::fs::remove_file(&socket)?;
    Ok(std::fs::remove_file(&unit)?)
}

/// The unit in `root` runs the program that is in `root`, and systemd understands it whole.
fn check_stamp_unit(test: &str, root: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(root.join(&STAMP[1..]))?;
    let runs = text.lines().find_map(|line| line.strip_prefix("ExecStart="));
    let program = runs.and_then(|words| words.split_whitespace().next()).context("no program")?;
    let there = root.join(program.trim_start_matches('/'));
    ensure!(there.is_file(), "{program} is not in the package");
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        skip(test, "there is no systemd-analyze: the unit was not looked at");
        return Ok(());
    }
    let unit = root.join("usr/lib/systemd/system/stamp-test.service");
    std::fs::write(&unit, text.replace(program, &there.to_string_lossy()))?;
    let verified = run(Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .arg(&unit))?;
    let said = String::from_utf8_lossy(&verified.stderr);
    ensure!(verified.status.success() && !said.contains("stamp-test"), "{said}");
    Ok(std::fs::remove_file(&unit)?)
}

#[test]
fn a_package_is_all_that_a_clean_root_needs() -> anyhow::Result<()> {
    let test = "a_package_is_all_that_a_clean_root_needs";
    if !is_possible(test) {
        return Ok(());
    }
    let room = Room::new()?;
    let (root, out) = (room.dir().join("root"), room.dir().join("out"));
    clean_root(&root)?;
    let package = package(&out, "godwit_")?;
    let package = package.to_str().context("a path that is text")?;
    done(&mut dpkg(&root, &["-i", package]))?;

    let inside = |words: &[&str]| {
        let mut command = Command::new("chroot");
        command.arg(&root).arg("/usr/bin/godwit").args(words);
        run(&mut command)
    };
    let version = inside(&["--version"])?;
    ensure!(version.status.success(), "{version:?}");
    let name = Path::new(package).file_name().context("no name")?.to_string_lossy();
    let version = String::from_utf8(version.stdout)?;
    let number = version.split_whitespace().nth(1).context("no number")?;
    ensure!(name.starts_with(&format!("godwit_{number}_")), "{version} is in {name}");
    let simulated = inside(&["simulate", "--json"])?;
    ensure!(simulated.status.success(), "{simulated:?}");
    ensure!(!simulated.stdout.is_empty());
    let wrong = inside(&["migrate", "--nonsense"])?;
    ensure!(wrong.status.code() == Some(2), "{wrong:?}");

    // The daemon, which has the same below it.
    let daemon =
        |words: &[&str]| run(Command::new("chroot").arg(&root).arg("/usr/bin/godwitd").args(words));
    let output = daemon(&["--version"])?;
    ensure!(String::from_utf8(output.stdout)?.contains(number), "godwitd is no {number}");
    let output = daemon(&["--config", "/nowhere"])?;
    ensure!(output.status.code() == Some(1), "{output:?}");

    let files = done(&mut dpkg(&root, &["-L", "godwit"]))?;
    for wanted in [
        "/usr/share/man/man1/godwit.1.gz",
        "/usr/share/man/man1/godwit-migrate.1.gz",
        "/usr/share/man/man1/godwit-microvm-run.1.gz",
        "/usr/share/bash-completion/completions/godwit",
        "/usr/share/zsh/vendor-completions/_godwit",
        "/usr/share/fish/vendor_completions.d/godwit.fish",
        "/usr/share/doc/godwit/docs/qemu.md",
        "/usr/share/doc/godwit/copyright",
        UNIT,
        "/usr/share/man/man8/godwitd.8.gz",
        "/usr/share/bash-completion/completions/godwitd",
        DAEMON,
    ] {
        ensure!(files.lines().any(|file| file == wanted), "{wanted} is not in {files}");
        ensure!(root.join(&wanted[1..]).metadata()?.len() > 0, "{wanted} is empty");
    }

    check_unit(test, &root)?;

    // A system without its C library is told so.
    let status = root.join("var/lib/dpkg/status");
    done(&mut dpkg(&root, &["-P", "godwit"]))?;
    for file in files.lines().filter(|file| file.contains("godwit")) {
        ensure!(!root.join(&file[1..]).exists(), "{file} was left behind");
    }
    std::fs::write(&status, "")?;
    let refused = run(&mut dpkg(&root, &["-i", package]))?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && said.contains("depends on libc6"), "{said}");
    Ok(())
}

#[test]
fn the_package_of_the_stamp_needs_nothing() -> anyhow::Result<()> {
    let test = "the_package_of_the_stamp_needs_nothing";
    if !is_possible(test) {
        return Ok(());
    }
    let room = Room::new()?;
    let (root, out) = (room.dir().join("root"), room.dir().join("out"));
    // Not even a C library. Mutation: the program is not static, or the package depends on one.
    database(&root, "")?;
    let package = package(&out, "godwit-stamp_")?;
    done(&mut dpkg(&root, &["-i", package.to_str().context("a path that is text")?]))?;

    let inside = |words: &[&str]| {
        done(Command::new("chroot").arg(&root).arg("/usr/bin/godwit-stamp").args(words))
    };
    let version = inside(&["--version"])?;
    let number = version.split_whitespace().nth(1).context("no number")?;
    let name = package.file_name().context("no name")?.to_string_lossy();
    ensure!(name.starts_with(&format!("godwit-stamp_{number}_")), "{version} is in {name}");
    ensure!(inside(&["run", "--help"])?.contains("--destroy-data"));

    let files = done(&mut dpkg(&root, &["-L", "godwit-stamp"]))?;
    for wanted in [
        "/usr/share/doc/godwit-stamp/stamp.md",
        "/usr/share/doc/godwit-stamp/changelog.gz",
        "/usr/share/doc/godwit-stamp/copyright",
        STAMP,
    ] {
        ensure!(files.lines().any(|file| file == wanted), "{wanted} is not in {files}");
        ensure!(root.join(&wanted[1..]).metadata()?.len() > 0, "{wanted} is empty");
    }
    // An operator starts it, and names the disks.
    ensure!(!root.join("etc/systemd").exists(), "the unit is enabled");
    check_stamp_unit(test, &root)?;

    done(&mut dpkg(&root, &["-P", "godwit-stamp"]))?;
    for file in files.lines().filter(|file| file.contains("godwit")) {
        ensure!(!root.join(&file[1..]).exists(), "{file} was left behind");
    }
    Ok(())
}
