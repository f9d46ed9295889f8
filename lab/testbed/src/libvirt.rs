//! Hosts with a libvirt of their own, side by side on one machine, and guests that libvirt starts.
//!
//! Each daemon runs in a mount namespace of its own, with directories of its own where libvirt has
//! its sockets, its domains and its logs; all else of the machine they share, as hosts with shared
//! storage do. They have no KVM: where root alone may open it, libvirt finds it and does not find
//! it by turns, and looks at QEMU anew at each start.
//!
//! Each daemon has an init of its own, which takes in the processes that the daemon lets go of, as
//! it does with its QEMUs, and buries them at once: libvirt waits for a QEMU that it has ended for
//! as long as the kernel has its number, and an init of a container may look only once a second.
//!
//! Keeps two promises: a host that is dropped takes its domains with it, and what libvirt has found
//! out about a QEMU, which takes seconds, is kept for the next host.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::console::{Beat, Console};
use crate::guest::{GuestConfig, GuestFiles, target_dir};
use crate::leftovers::{Place, end_qemus, unique};
use crate::qemu_build::QemuBuild;
use crate::skip;

const START_LIMIT: Duration = Duration::from_secs(30);
const END_LIMIT: Duration = Duration::from_secs(10);
/// How often a file that grows is looked at.
const PAUSE: Duration = Duration::from_millis(5);
/// The directories that each daemon has for itself.
const OWN: [(&str, &str); 4] = [
    ("run", "/run/libvirt"),
    ("lib", "/var/lib/libvirt"),
    ("log", "/var/log/libvirt"),
    ("etc", "/etc/libvirt"),
];
/// Where Debian's QEMU has its modules.
const MODULES: &str = "/usr/lib/x86_64-linux-gnu/qemu";
/// An init (PR_SET_CHILD_SUBREAPER, prctl(2)): runs what follows and waits for whatever is left of
/// it.
const INIT: &str = "syscall(157, 36, 1, 0, 0, 0) == 0 or die $!; fork or exec @ARGV or die $!; \
                    1 while waitpid(-1, 0) > 0";
/// Where libvirt keeps what it knows of a QEMU.
const CACHE: &str = "/var/cache/libvirt";

/// Whether libvirt can be had here. If not, says on standard error that the test `test` is skipped.
#[must_use]
pub fn libvirt_for(test: &str) -> bool {
    let runs = |program: &str| {
        let output = Command::new(program).arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    };
    let missing =
        ["libvirtd", "virsh", "unshare", "setpriv", "perl"].into_iter().find(|it| !runs(it));
    let why = match missing {
        Some(program) => format!("{program} is missing: run `make qemu`"),
        None if !rustix::process::getuid().is_root() => "libvirt's daemon needs root".to_owned(),
        None => return true,
    };
    skip(test, why);
    false
}

/// A host: a libvirt daemon with its own domains.
#[derive(Debug)]
pub struct LibvirtHost {
    place: Place,
    /// Of each daemon that was started, the last one's last.
    inits: Vec<Child>,
    /// What its QEMU has in the place of the system's modules.
    modules: Option<PathBuf>,
}

impl LibvirtHost {
    /// Starts one that knows no domain.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with(None)
    }

    /// The same for domains in this QEMU. One that was unpacked would find the system's modules
    /// where it has none of its own, and end over them as soon as libvirt asks what it can do.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start_for(build: &QemuBuild) -> anyhow::Result<Self> {
        let root = build.program.parent().map(|directory| directory.join("root"));
        Self::start_with(root.map(|root| root.join(&MODULES[1..])).filter(|it| it.is_dir()))
    }

    fn start_with(modules: Option<PathBuf>) -> anyhow::Result<Self> {
        let place = Place::new()?;
        for (name, _) in OWN {
            std::fs::create_dir(place.file(name)).context("cannot make a directory")?;
        }
        // QEMU writes its console itself, instead of through one more daemon; control groups are
        // the machine's, where two hosts would have the same for the same domain.
        let qemu = "stdio_handler = \"file\"\ncgroup_controllers = []\n";
        std::fs::write(place.file("etc").join("qemu.conf"), qemu)?;
        // Libvirt migrates to another host alone.
        let uuid = format!("{:08x}-7a11-4b1e-9c0d-{:012x}", std::process::id(), unique().1);
        let own = format!("auth_unix_rw = \"none\"\nhost_uuid = \"{uuid}\"\n");
        std::fs::write(place.file("etc").join("libvirtd.conf"), own)?;
        let mut host = Self { place, inits: Vec::new(), modules };
        host.spawn()?;
        host.await_daemon()?;
        Ok(host)
    }

    fn spawn(&mut self) -> anyhow::Result<()> {
        let place = &self.place;
        let cache = target_dir().join("libvirt-cache");
        std::fs::create_dir_all(&cache).context("cannot make a directory")?;
        let mut script = "set -e\n".to_owned();
        let own = OWN.map(|(name, at)| (place.file(name), at));
        for (from, at) in own.iter().map(|(from, at)| (from, *at)).chain([(&cache, CACHE)]) {
            let from = from.display();
            script += &format!("mkdir -p {at}\nmount --bind '{from}' {at}\n");
        }
        if let Some(modules) = &self.modules {
            script += &format!("mount --bind '{}' {MODULES}\n", modules.display());
        }
        // A device that is no KVM, which libvirt may move about as it does with what is in /dev.
        let no_kvm = place.file("no-kvm");
        let no_kvm = no_kvm.display();
        script += &format!(
            "if [ -e /dev/kvm ]; then rm -f '{no_kvm}'; mknod -m 600 '{no_kvm}' c 1 3\n\
             mount --bind '{no_kvm}' /dev/kvm; fi\n"
        );
        script += "exec libvirtd --pid-file /run/libvirt/libvirtd.pid\n";
        let errors = File::options().append(true).create(true).open(place.file("stderr"))?;
        let init = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "perl", "-e", INIT, "setpriv", "--pdeathsig", "TERM"])
            .args(["unshare", "--mount", "--propagation", "private"])
            .args(["sh", "-c", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .context("cannot start libvirtd")?;
        self.inits.push(init);
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.place.file("run").join("libvirt-sock")
    }

    fn await_daemon(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + START_LIMIT;
        while UnixStream::connect(self.socket()).is_err() {
            let ended = self.inits.last_mut().map(Child::try_wait).transpose()?.flatten();
            ensure!(ended.is_none() && Instant::now() < until, "libvirtd: {}", self.errors());
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// What its daemon complained of.
    #[must_use]
    pub fn errors(&self) -> String {
        std::fs::read_to_string(self.place.file("stderr")).unwrap_or_default()
    }

    /// Where it is.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}", self.socket().display())
    }

    /// As the command names it, to take a domain in.
    #[must_use]
    pub fn vm_name(&self) -> String {
        format!("libvirt:@{}", self.uri())
    }

    /// As the command names a domain of its own.
    #[must_use]
    pub fn domain(&self, name: &str) -> String {
        format!("libvirt:{name}@{}", self.uri())
    }

    /// Runs virsh to its end.
    ///
    /// # Errors
    /// When virsh has one, in its words.
    pub fn virsh(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new("timeout");
        command.args(["120", "virsh", "-q", "-c", &self.uri()]).args(arguments);
        let output = command.output().context("cannot run virsh")?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        ensure!(output.status.success(), "virsh {arguments:?}: {said}");
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Has it call a hook for its domains, which writes down how it is called. The daemon is
    /// started anew, as it looks for hooks when it starts.
    ///
    /// # Errors
    /// When the daemon does not come up.
    pub fn hook(&mut self) -> anyhow::Result<()> {
        let hooks = self.place.file("etc").join("hooks");
        std::fs::create_dir_all(&hooks)?;
        let script = format!("#!/bin/sh\necho \"$*\" >> {}\n", self.hook_log().display());
        std::fs::write(hooks.join("qemu"), script)?;
        std::fs::set_permissions(hooks.join("qemu"), std::fs::Permissions::from_mode(0o755))?;
        self.restart_daemon()
    }

    fn hook_log(&self) -> PathBuf {
        self.place.file("hook-calls")
    }

    /// How the hook was called since this was asked last, a line each.
    ///
    /// # Errors
    /// When that cannot be read.
    pub fn hook_calls(&self) -> anyhow::Result<String> {
        let calls = std::fs::read_to_string(self.hook_log()).unwrap_or_default();
        File::create(self.hook_log())?;
        Ok(calls)
    }

    /// `program` as who is logged in on this host runs it, where libvirt's directories are its own.
    ///
    /// # Errors
    /// When its daemon does not run.
    pub fn command(&self, program: &str) -> anyhow::Result<Command> {
        let daemon = self.daemon().context("libvirtd does not run")?.as_raw_nonzero();
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{daemon}/ns/mnt")).arg(program);
        command.env_remove("LIBVIRT_DEFAULT_URI").stdin(Stdio::null());
        Ok(command)
    }

    /// Moves the domain `name` to `other` as libvirt does it.
    ///
    /// # Errors
    /// When libvirt has one.
    pub fn migrate(&self, name: &str, other: &Self, options: &[&str]) -> anyhow::Result<()> {
        let (to, on_this_machine) = (other.uri(), "tcp://127.0.0.1");
        let command = ["migrate", "--live", name, &to, "--migrateuri", on_this_machine];
        self.virsh(&[command.as_slice(), options].concat()).map(drop)
    }

    /// Writes down the events of all its QEMUs from here on.
    ///
    /// # Errors
    /// When virsh does not start.
    pub fn watch(&self) -> anyhow::Result<QemuEvents> {
        let path = self.place.file("events");
        let file = File::create(&path)?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "stdbuf", "-oL", "virsh", "-q", "-c", &self.uri()]);
        command.args(["qemu-monitor-event", "--loop"]).stdin(Stdio::null());
        let virsh = command.stdout(file).stderr(Stdio::null()).spawn()?;
        Ok(QemuEvents { virsh, path })
    }

    /// What virsh says that the domain `name` does; `none` where there is no such domain.
    ///
    /// # Errors
    /// When virsh fails otherwise.
    pub fn state(&self, name: &str) -> anyhow::Result<String> {
        let listed = || -> anyhow::Result<bool> {
            let names = self.virsh(&["list", "--all", "--name"])?;
            Ok(names.lines().any(|line| line.trim() == name))
        };
        match self.virsh(&["domstate", name]) {
            // It may have gone a moment ago.
            Err(_) if !listed()? => Ok("none".to_owned()),
            state => state,
        }
    }

    /// One of the answers of `virsh dominfo`.
    ///
    /// # Errors
    /// When there is no such domain.
    pub fn info(&self, name: &str, key: &str) -> anyhow::Result<String> {
        let info = self.virsh(&["dominfo", name])?;
        let line = info.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        Ok(line.with_context(|| format!("no '{key}' in {info}"))?.trim().to_owned())
    }

    /// The daemon's process.
    fn daemon(&self) -> Option<Pid> {
        let text = std::fs::read_to_string(self.place.file("run").join("libvirtd.pid")).ok()?;
        Pid::from_raw(text.trim().parse().ok()?)
    }

    /// Ends the daemon at once, as a crash would. Its domains run on.
    pub fn kill_daemon(&mut self) {
        let Some(daemon) = self.daemon() else { return };
        let _ = kill_process(daemon, Signal::KILL);
        let until = Instant::now() + START_LIMIT;
        while test_kill_process(daemon).is_ok() && Instant::now() < until {
            std::thread::sleep(PAUSE);
        }
    }

    /// Starts the daemon again.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn restart_daemon(&mut self) -> anyhow::Result<()> {
        self.kill_daemon();
        let _ = std::fs::remove_file(self.socket());
        self.spawn()?;
        self.await_daemon()
    }

    /// The process of a domain that runs.
    ///
    /// # Errors
    /// When none does.
    pub fn qemu(&self, name: &str) -> anyhow::Result<i32> {
        let path = self.place.file("run").join("qemu").join(format!("{name}.pid"));
        let text = std::fs::read_to_string(path).context("the domain has no process")?;
        text.trim().parse().context("no process number")
    }

    /// What the QEMU of a domain has said.
    #[must_use]
    pub fn log(&self, name: &str) -> String {
        let path = self.place.file("log").join("qemu").join(format!("{name}.log"));
        std::fs::read_to_string(path).unwrap_or_default()
    }
}

impl Drop for LibvirtHost {
    fn drop(&mut self) {
        // First the daemon, which would look at the ends of the others.
        self.kill_daemon();
        end_qemus(self.place.dir());
        // With nothing left to wait for they end.
        let until = Instant::now() + END_LIMIT;
        for init in &mut self.inits {
            while matches!(init.try_wait(), Ok(None)) && Instant::now() < until {
                std::thread::sleep(PAUSE);
            }
            let _ = init.kill();
            let _ = init.wait();
        }
    }
}

/// Events of QEMUs, with QEMU's own times.
#[derive(Debug)]
pub struct QemuEvents {
    virsh: Child,
    path: PathBuf,
}

impl QemuEvents {
    /// When `event` came last, by the wall clock.
    ///
    /// # Errors
    /// When what virsh has written cannot be read.
    pub fn last(&self, event: &str) -> anyhow::Result<Option<Duration>> {
        let text = std::fs::read_to_string(&self.path)?;
        let mut times = text.lines().filter_map(|line| {
            let (_, rest) = line.split_once(&format!("event {event} at "))?;
            rest.split_whitespace().next()?.parse().ok().map(Duration::from_secs_f64)
        });
        Ok(times.next_back())
    }
}

impl Drop for QemuEvents {
    fn drop(&mut self) {
        let _ = self.virsh.kill();
        let _ = self.virsh.wait();
    }
}

/// A guest that libvirt starts, on whichever host; what it prints goes to one file wherever it is.
#[derive(Debug)]
pub struct LibvirtGuest {
    name: String,
    xml: String,
    console: Console,
    place: Place,
    over: Arc<AtomicBool>,
}

impl LibvirtGuest {
    /// One in the QEMU `build` that does this work, with more devices in libvirt's XML.
    ///
    /// # Errors
    /// When the guest's files are missing.
    pub fn new(build: &QemuBuild, guest: &GuestConfig, devices: &str) -> anyhow::Result<Self> {
        let place = Place::new()?;
        let files = GuestFiles::find()?;
        // Libvirt gives them to QEMU's user, and need not reach into this tree.
        for (from, name) in [(&files.kernel, "vmlinuz"), (&files.initramfs, "initramfs")] {
            std::fs::copy(from, place.file(name)).context("cannot copy the guest")?;
        }
        let serial = place.file("serial");
        File::create(&serial)?.write_all(b"")?;
        std::fs::set_permissions(&serial, std::fs::Permissions::from_mode(0o666))?;
        let (name, _) = unique();
        let program = match build.program.is_absolute() {
            true => build.program.clone(),
            false => Path::new("/usr/bin").join(&build.program),
        };
        let xml = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='b'>{memory}</memory>\
             <vcpu>1</vcpu><os><type arch='x86_64' machine='q35'>hvm</type>\
             <kernel>{kernel}</kernel><initrd>{initrd}</initrd><cmdline>{words}</cmdline></os>\
             <features><acpi/></features><on_reboot>destroy</on_reboot><devices>\
             <emulator>{program}</emulator>\
             <serial type='file'><source path='{serial}' append='on'>\
             <seclabel model='dac' relabel='no'/></source></serial>\
             <memballoon model='virtio'/>{devices}</devices></domain>",
            memory = guest.memory.0,
            kernel = place.file("vmlinuz").display(),
            initrd = place.file("initramfs").display(),
            words = guest.command_line(),
            program = program.display(),
            serial = serial.display(),
        );
        let over = Arc::new(AtomicBool::new(false));
        let console = Console::read(Growing { file: File::open(serial)?, over: Arc::clone(&over) });
        Ok(Self { name, xml, console, place, over })
    }

    /// The same under another name.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        let element = |name: &str| format!("<name>{name}</name>");
        self.xml = self.xml.replace(&element(&self.name), &element(name));
        self.name = name.to_owned();
        self
    }

    /// Its name on every host.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Starts it on `host`, where it goes when it ends.
    ///
    /// # Errors
    /// When libvirt does not.
    pub fn create_on(&self, host: &LibvirtHost) -> anyhow::Result<()> {
        host.virsh(&["create", &self.xml_file()?]).map(drop)
    }

    /// Defines it on `host`, and starts it.
    ///
    /// # Errors
    /// When libvirt does not.
    pub fn define_on(&self, host: &LibvirtHost) -> anyhow::Result<()> {
        host.virsh(&["define", &self.xml_file()?])?;
        host.virsh(&["start", &self.name]).map(drop)
    }

    fn xml_file(&self) -> anyhow::Result<String> {
        let path = self.place.file("domain.xml");
        std::fs::write(&path, &self.xml)?;
        Ok(path.display().to_string())
    }

    /// Waits until it works, or works on: `count` heartbeats from now on.
    ///
    /// # Errors
    /// When they do not come within `limit`.
    pub fn await_beats(&self, count: usize, limit: Duration) -> anyhow::Result<Vec<Beat>> {
        let from = Instant::now();
        self.console.wait(&format!("{count} heartbeats"), limit, |console| {
            let mut beats = console.beats();
            beats.retain(|beat| beat.at > from);
            (beats.len() >= count).then_some(beats)
        })
    }

    /// Its heartbeats so far.
    #[must_use]
    pub fn beats(&self) -> Vec<Beat> {
        self.console.beats()
    }

    /// Lines that tell of damaged memory, from the guest or from its kernel.
    #[must_use]
    pub fn bugs(&self) -> Vec<String> {
        self.console.bugs()
    }

    /// A file beside its own, for a disk.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.place.file(name)
    }
}

impl Drop for LibvirtGuest {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// A file to which others add.
struct Growing {
    file: File,
    over: Arc<AtomicBool>,
}

impl Read for Growing {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.file.read(buffer)?;
            if count > 0 || self.over.load(Ordering::Relaxed) {
                return Ok(count);
            }
            std::thread::sleep(PAUSE);
        }
    }
}
