//! The Debian packages: each installed into a root that has nothing but what it depends on, run
//! there, and removed without a trace.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, ensure};
use godwit_testbed::{Godwit, Room, skip};

/// What the packages of the command and of the daemon depend on.
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

/// Checks that dpkg does not install `package` below `root`, and says so in `words`.
fn check_refused(root: &Path, package: &str, words: &str) -> anyhow::Result<()> {
    let refused = run(&mut dpkg(root, &["-i", package]))?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && said.contains(words), "{said}");
    Ok(())
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

/// Files and directories below `root` but what dpkg keeps.
fn tree(root: &Path) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    let mut dirs = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            if entry.path() == root.join("var") {
                continue;
            }
            if entry.file_type()?.is_dir() {
                dirs.push(entry.path());
            }
            found.insert(entry.path());
        }
    }
    Ok(found)
}

/// Packages that were made.
struct Packages(Vec<String>);

impl Packages {
    /// The path of the one called `name`.
    fn path(&self, name: &str) -> anyhow::Result<&str> {
        let begin = format!("{name}_");
        let is_it =
            |path: &&String| path.rsplit('/').next().is_some_and(|it| it.starts_with(&begin));
        self.0.iter().find(is_it).map(String::as_str).with_context(|| format!("no package {name}"))
    }

    /// The version of the one called `name`.
    fn version(&self, name: &str) -> anyhow::Result<String> {
        let mut ask = Command::new("dpkg-deb");
        ask.args(["--field", self.path(name)?, "Version"]);
        Ok(done(&mut ask)?.trim().to_owned())
    }
}

/// Makes the packages of the godwit that is tested.
fn packages(out: &Path) -> anyhow::Result<Packages> {
    let godwit = Godwit::built()?;
    let program = godwit.program();
    let xtask = program.parent().context("no directory")?.join("xtask");
    ensure!(xtask.exists(), "{} is missing: `cargo build -p xtask`", xtask.display());
    let mut make = Command::new(xtask);
    make.args(["deb", "--binary"]).arg(program).arg("--out").arg(out);
    // To make them small takes longer than all the rest (dpkg-deb(1), "ENVIRONMENT").
    make.env("DPKG_DEB_COMPRESSOR_TYPE", "none");
    let made = done(&mut make)?;
    Ok(Packages(made.lines().map(str::to_owned).collect()))
}

/// What `program` of `root` says there to `words`.
fn inside(root: &Path, program: &str, words: &[&str]) -> anyhow::Result<Output> {
    run(Command::new("chroot").arg(root).arg(program).args(words))
}

/// Those of `wanted` are files of the package `name` in `root`, and hold something. All its files.
fn check_files(root: &Path, name: &str, wanted: &[&str]) -> anyhow::Result<String> {
    let files = done(&mut dpkg(root, &["-L", name]))?;
    for wanted in wanted {
        ensure!(files.lines().any(|file| file == *wanted), "{wanted} is not in {files}");
        ensure!(root.join(&wanted[1..]).metadata()?.len() > 0, "{wanted} is empty");
    }
    Ok(files)
}

/// Whether systemd is here to look at units; says that it is not.
fn has_systemd(test: &str) -> bool {
    let is_here = Command::new("systemd-analyze").arg("--version").output().is_ok();
    if !is_here {
        skip(test, "there is no systemd-analyze: the units were not looked at");
    }
    is_here
}

/// Systemd understands `unit` whole: it passes over a slip of the pen in a setting with a warning.
fn verify(unit: &Path) -> anyhow::Result<()> {
    let verified = run(Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .arg(unit))?;
    let said = String::from_utf8_lossy(&verified.stderr);
    let name = unit.file_name().context("no name")?.to_string_lossy();
    ensure!(verified.status.success() && !said.contains(&*name), "{said}");
    Ok(())
}

/// The unit `from` of a package in `root` as `to`, with the program `/usr/bin/NAME` that is there.
fn tried_unit(root: &Path, from: &str, to: &str, name: &str) -> anyhow::Result<PathBuf> {
    let text = std::fs::read_to_string(root.join(&from[1..]))?;
    let program = format!("/usr/bin/{name}");
    ensure!(root.join(&program[1..]).is_file(), "{program} is not in {}", root.display());
    ensure!(text.contains(&program), "{from} does not run {program}");
    let there = root.join(&program[1..]);
    let unit = root.join("usr/lib/systemd/system").join(to);
    std::fs::write(&unit, text.replace(&program, &there.to_string_lossy()))?;
    Ok(unit)
}

/// The unit of a destination in `root` is one that systemd understands whole, and has it confined.
fn check_unit(test: &str, root: &Path) -> anyhow::Result<()> {
    if !has_systemd(test) {
        return Ok(());
    }
    // An instance of it, since its name is that of a file of options.
    let unit = tried_unit(root, UNIT, "godwit-receive@test.service", "godwit")?;
    // Mutation: a setting with a slip of the pen.
    verify(&unit)?;
    let secure = run(Command::new("systemd-analyze")
        .args(["security", "--no-pager", "--offline=true", "--threshold=45"])
        .arg(&unit))?;
    let said = String::from_utf8_lossy(&secure.stdout);
    ensure!(secure.status.success(), "{said}");
    Ok(std::fs::remove_file(&unit)?)
}

/// The units of the daemon in `root` are ones that systemd understands whole, under other names.
fn check_daemon_units(test: &str, root: &Path) -> anyhow::Result<()> {
    if !has_systemd(test) {
        return Ok(());
    }
    let unit = tried_unit(root, DAEMON, "daemon-test.service", "godwitd")?;
    verify(&unit)?;
    // With the socket that may be handed over to it.
    let socket = root.join("usr/lib/systemd/system/daemon-test.socket");
    std::fs::copy(root.join(&DAEMON_SOCKET[1..]), &socket)?;
    verify(&socket)?;
    std::fs::remove_file(&socket)?;
    Ok(std::fs::remove_file(&unit)?)
}

/// The unit in `root` runs the program that is in `root`, and systemd understands it whole.
fn check_stamp_unit(test: &str, root: &Path) -> anyhow::Result<()> {
    if !has_systemd(test) {
        return Ok(());
    }
    let unit = tried_unit(root, STAMP, "stamp-test.service", "godwit-stamp")?;
    verify(&unit)?;
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
    let before = tree(&root)?;
    let packages = packages(&out)?;
    let package = packages.path("godwit")?;
    done(&mut dpkg(&root, &["-i", package]))?;

    let godwit = |words: &[&str]| inside(&root, "/usr/bin/godwit", words);
    let version = godwit(&["--version"])?;
    ensure!(version.status.success(), "{version:?}");
    let version = String::from_utf8(version.stdout)?;
    let number = version.split_whitespace().nth(1).context("no number")?;
    ensure!(packages.version("godwit")? == number, "{version} is in {package}");
    let simulated = godwit(&["simulate", "--json"])?;
    ensure!(simulated.status.success(), "{simulated:?}");
    ensure!(!simulated.stdout.is_empty());
    let wrong = godwit(&["migrate", "--nonsense"])?;
    ensure!(wrong.status.code() == Some(2), "{wrong:?}");

    let wanted = [
        "/usr/share/man/man1/godwit.1.gz",
        "/usr/share/man/man1/godwit-migrate.1.gz",
        "/usr/share/man/man1/godwit-microvm-run.1.gz",
        "/usr/share/bash-completion/completions/godwit",
        "/usr/share/zsh/vendor-completions/_godwit",
        "/usr/share/fish/vendor_completions.d/godwit.fish",
        "/usr/share/doc/godwit/docs/qemu.md",
        "/usr/share/doc/godwit/docs/service.md",
        "/usr/share/doc/godwit/copyright",
        UNIT,
    ];
    let files = check_files(&root, "godwit", &wanted)?;
    // The daemon is another package's. Mutations: its program, its units or its document is here.
    ensure!(!files.contains("godwitd"), "{files}");

    check_unit(test, &root)?;

    done(&mut dpkg(&root, &["-P", "godwit"]))?;
    let left: Vec<_> = tree(&root)?.difference(&before).cloned().collect();
    ensure!(left.is_empty(), "left behind: {left:?}");
    // A system without its C library is told so.
    std::fs::write(root.join("var/lib/dpkg/status"), "")?;
    check_refused(&root, package, "depends on libc6")
}

#[test]
fn the_daemon_has_a_package_of_its_own() -> anyhow::Result<()> {
    let test = "the_daemon_has_a_package_of_its_own";
    if !is_possible(test) {
        return Ok(());
    }
    let room = Room::new()?;
    let (root, out) = (room.dir().join("root"), room.dir().join("out"));
    clean_root(&root)?;
    let before = tree(&root)?;
    let packages = packages(&out)?;
    let number = packages.version("godwitd")?;

    // Not without the command that it runs, and of no other release.
    let needs = format!("depends on godwit (= {number})");
    check_refused(&root, packages.path("godwitd")?, &needs)?;
    done(&mut dpkg(&root, &["-P", "godwitd"]))?;
    done(&mut dpkg(&root, &["-i", packages.path("godwit")?]))?;
    let without = tree(&root)?;
    done(&mut dpkg(&root, &["-i", packages.path("godwitd")?]))?;

    let godwitd = |words: &[&str]| inside(&root, "/usr/bin/godwitd", words);
    let version = String::from_utf8(godwitd(&["--version"])?.stdout)?;
    ensure!(version.trim() == format!("godwitd {number}"), "{version}");
    let output = godwitd(&["--config", "/nowhere"])?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    let wanted = [
        "/usr/share/man/man8/godwitd.8.gz",
        "/usr/share/bash-completion/completions/godwitd",
        "/usr/share/zsh/vendor-completions/_godwitd",
        "/usr/share/fish/vendor_completions.d/godwitd.fish",
        "/usr/share/doc/godwit/docs/godwitd.md",
        "/usr/share/doc/godwitd/changelog.gz",
        "/usr/share/doc/godwitd/copyright",
        DAEMON,
        DAEMON_SOCKET,
    ];
    check_files(&root, "godwitd", &wanted)?;
    // An operator starts it, and writes its configuration.
    ensure!(!root.join("etc/systemd").exists(), "the unit is enabled");
    check_daemon_units(test, &root)?;

    // It goes, and the command stays whole; with that all is gone.
    done(&mut dpkg(&root, &["-P", "godwitd"]))?;
    ensure!(tree(&root)? == without, "of the daemon something stays, or it took something along");
    done(&mut dpkg(&root, &["-P", "godwit"]))?;
    let left: Vec<_> = tree(&root)?.difference(&before).cloned().collect();
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

/// A package of the command as it was made when the daemon was in it, as far as dpkg looks at it.
fn older_package(dir: &Path, version: &str) -> anyhow::Result<PathBuf> {
    let root = dir.join("older");
    for file in ["usr/bin/godwit", "usr/bin/godwitd", &DAEMON[1..], "usr/share/doc/godwit/older"] {
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().context("no directory")?)?;
        std::fs::write(file, "older")?;
    }
    let architecture = done(Command::new("dpkg").arg("--print-architecture"))?;
    let control = format!(
        "Package: godwit\nVersion: {version}\nArchitecture: {}\n\
         Maintainer: nobody <nobody@localhost>\nDescription: as it was\n",
        architecture.trim()
    );
    std::fs::create_dir_all(root.join("DEBIAN"))?;
    std::fs::write(root.join("DEBIAN/control"), control)?;
    let package = dir.join("older.deb");
    done(
        Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(&root).arg(&package),
    )?;
    Ok(package)
}

#[test]
fn an_older_package_with_the_daemon_in_it_makes_room_for_both() -> anyhow::Result<()> {
    let test = "an_older_package_with_the_daemon_in_it_makes_room_for_both";
    if !is_possible(test) {
        return Ok(());
    }
    let room = Room::new()?;
    let packages = packages(&room.dir().join("out"))?;
    let (command, daemon) = (packages.path("godwit")?, packages.path("godwitd")?);
    let number = packages.version("godwit")?;
    // Of the release before, and of this one before it was out. Mutations: `Replaces` or `Breaks`
    // is missing, or means older releases alone.
    for (turn, version) in ["0.1.0", &number].into_iter().enumerate() {
        let root = room.dir().join(format!("root-{turn}"));
        clean_root(&root)?;
        let older = older_package(room.dir(), version)?;
        done(&mut dpkg(&root, &["-i", older.to_str().context("a path that is text")?]))?;
        // The daemon first, as apt may have it, which allows this by itself.
        done(&mut dpkg(&root, &["--auto-deconfigure", "-i", daemon, command]))?;

        let whose = done(&mut dpkg(&root, &["-S", "/usr/bin/godwitd", DAEMON]))?;
        ensure!(whose == format!("godwitd: /usr/bin/godwitd\ngodwitd: {DAEMON}\n"), "{whose}");
        let version = String::from_utf8(inside(&root, "/usr/bin/godwitd", &["--version"])?.stdout)?;
        ensure!(version.trim() == format!("godwitd {number}"), "{version}");
        ensure!(!root.join("usr/share/doc/godwit/older").exists());
    }

    // By itself, the daemon does not run beside a command of another release.
    let root = room.dir().join("root-alone");
    clean_root(&root)?;
    let older = older_package(room.dir(), "0.1.0")?;
    done(&mut dpkg(&root, &["-i", older.to_str().context("a path that is text")?]))?;
    check_refused(&root, daemon, "would break godwit")
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
    let before = tree(&root)?;
    let packages = packages(&out)?;
    done(&mut dpkg(&root, &["-i", packages.path("godwit-stamp")?]))?;

    let stamp = |words: &[&str]| {
        let output = inside(&root, "/usr/bin/godwit-stamp", words)?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let version = stamp(&["--version"])?;
    let number = version.split_whitespace().nth(1).context("no number")?;
    ensure!(packages.version("godwit-stamp")? == number, "{version} is in another package");
    ensure!(stamp(&["run", "--help"])?.contains("--destroy-data"));

    let wanted = [
        "/usr/share/doc/godwit-stamp/stamp.md",
        "/usr/share/doc/godwit-stamp/changelog.gz",
        "/usr/share/doc/godwit-stamp/copyright",
        STAMP,
    ];
    check_files(&root, "godwit-stamp", &wanted)?;
    // An operator starts it, and names the disks.
    ensure!(!root.join("etc/systemd").exists(), "the unit is enabled");
    check_stamp_unit(test, &root)?;

    done(&mut dpkg(&root, &["-P", "godwit-stamp"]))?;
    let left: Vec<_> = tree(&root)?.difference(&before).cloned().collect();
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}
