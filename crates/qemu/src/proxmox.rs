//! VMs of Proxmox VE: where it has their monitors and definitions, what it has against a move, and
//! what it must be told afterwards.
//!
//! Proxmox has one monitor for each VM, at /var/run/qemu-server/ID.qmp, which it connects to for
//! each command anew and for no longer (PVE::QMPClient). Definitions are in /etc/pve, a file system
//! that all nodes of a cluster share: a VM belongs to the node in whose directory its file is
//! (PVE::QemuConfig).
//!
//! Invariant: from before the guest is stopped the VM is locked at its node, so that nothing there
//! runs it, or starts it a second time when it has left; only one that did not leave is unlocked.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::QemuError;
use crate::monitor::commands::QueryStatus;
use crate::monitor::{BriefMonitor, Monitor};

/// What all its paths begin with, where that is not /: for tests, and for looking at a copy.
const ROOT: &str = "GODWIT_PROXMOX_ROOT";
/// Who holds the lock of a definition does so for moments.
const LOCK_LIMIT: Duration = Duration::from_secs(10);

/// A VM by its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProxmoxVm {
    id: String,
    root: PathBuf,
}

fn refused(words: String) -> QemuError {
    QemuError::Proxmox(words)
}

fn no_proxmox(cluster: &Path) -> QemuError {
    refused(format!("there is no Proxmox VE here ({} is missing)", cluster.display()))
}

/// What all of its paths begin with.
fn root() -> PathBuf {
    let root = std::env::var_os(ROOT).filter(|root| !root.is_empty());
    root.map_or_else(|| PathBuf::from("/"), PathBuf::from)
}

/// What a definition says of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outline {
    /// In MiB.
    pub(crate) memory: Option<u64>,
    pub(crate) cpu: Option<String>,
    /// Names, and sizes as Proxmox writes them.
    pub(crate) disks: Vec<(String, String)>,
}

/// The kinds of disks (qm.conf(5)); what else has numbers is no disk.
const DISKS: [&str; 6] = ["virtio", "scsi", "sata", "ide", "efidisk", "tpmstate"];

fn outline(text: &str) -> Outline {
    // A value is `main,key=value,…`, and the main one may have its key before it.
    let words = |key: &str| setting(text, key).map(|value| value.split(','));
    let main = |key: &str, name: &str| {
        let first = words(key)?.next()?;
        Some(first.strip_prefix(name).unwrap_or(first).to_owned())
    };
    let own = text.lines().take_while(|line| !line.starts_with('['));
    let disk = |line: &str| {
        let (name, value) = line.split_once(": ")?;
        let kind = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let mut words = value.split(',').map(str::trim);
        let is_disk = DISKS.contains(&kind) && kind != name && words.all(|it| it != "media=cdrom");
        let size = value.split(',').find_map(|word| word.trim().strip_prefix("size="));
        is_disk.then_some((name.to_owned(), size?.to_owned()))
    };
    Outline {
        memory: main("memory", "current=").and_then(|text| text.parse().ok()),
        cpu: main("cpu", "cputype="),
        disks: own.filter_map(disk).collect(),
    }
}

impl ProxmoxVm {
    /// The VM `id` of this node, which runs, and has nothing against a move.
    ///
    /// # Errors
    /// What it has, with the cure.
    pub(crate) fn open(id: &str) -> Result<Self, QemuError> {
        Self::named(id)?.checked()
    }

    /// The VM `id` of this node.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn named(id: &str) -> Result<Self, QemuError> {
        Self::under(&root(), id)
    }

    /// The VMs that run here, each with its process, in the order of their numbers.
    ///
    /// # Errors
    /// When there is no Proxmox VE, or it cannot be looked at.
    pub(crate) fn that_run() -> Result<Vec<(Self, i32)>, QemuError> {
        Self::that_run_under(&root())
    }

    fn that_run_under(root: &Path) -> Result<Vec<(Self, i32)>, QemuError> {
        let cluster = root.join("etc/pve");
        if !cluster.is_dir() {
            return Err(no_proxmox(&cluster));
        }
        let run = root.join("var/run/qemu-server");
        let failed =
            |error: io::Error| refused(format!("{} cannot be looked at: {error}", run.display()));
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&run).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let Some(id) = name.to_str().and_then(|name| name.strip_suffix(".pid")) else {
                continue;
            };
            let vm = Self { id: id.to_owned(), root: root.to_owned() };
            // Its file may be there when its process is not.
            found.extend(vm.process().ok().map(|pid| (vm, pid)));
        }
        found.sort_by_key(|(vm, _)| (vm.id.len(), vm.id.clone()));
        Ok(found)
    }

    /// Its number.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// What its definition says, in Proxmox's words: its memory in MiB, its processor, and its
    /// disks with their sizes.
    ///
    /// # Errors
    /// When there is no definition of it here.
    pub(crate) fn outline(&self) -> Result<Outline, QemuError> {
        self.check_definition()?;
        Ok(outline(&self.settings()?))
    }

    fn under(root: &Path, id: &str) -> Result<Self, QemuError> {
        if !(3..=9).contains(&id.len()) || !id.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(refused(format!("'{id}' is no number of a VM of Proxmox's")));
        }
        let vm = Self { id: id.to_owned(), root: root.to_owned() };
        vm.check_definition()?;
        Ok(vm)
    }

    fn checked(self) -> Result<Self, QemuError> {
        let vm = self;
        vm.check_lock()?;
        vm.check_availability()?;
        vm.process()?;
        Ok(vm)
    }

    fn run(&self, ending: &str) -> PathBuf {
        self.root.join("var/run/qemu-server").join(format!("{}.{ending}", self.id))
    }

    fn cluster(&self) -> PathBuf {
        self.root.join("etc/pve")
    }

    fn definition(&self) -> PathBuf {
        self.cluster().join("qemu-server").join(format!("{}.conf", self.id))
    }

    /// Its only monitor.
    pub(crate) fn monitor(&self) -> PathBuf {
        self.run("qmp")
    }

    /// Refuses a VM of another node, or of none.
    fn check_definition(&self) -> Result<(), QemuError> {
        let (id, path) = (&self.id, self.definition());
        match path.metadata() {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(refused(format!(
                    "{} cannot be looked at: run godwit as root",
                    path.display()
                )));
            }
            Err(_) => {}
        }
        let nodes = std::fs::read_dir(self.cluster().join("nodes")).into_iter().flatten().flatten();
        let has_it = |node: &std::fs::DirEntry| {
            node.path().join("qemu-server").join(format!("{id}.conf")).exists()
        };
        if let Some(node) = nodes.into_iter().find(has_it) {
            let node = node.file_name().to_string_lossy().into_owned();
            return Err(refused(format!("VM {id} belongs to the node {node}: run godwit there")));
        }
        if self.cluster().is_dir() {
            return Err(refused(format!("there is no VM {id} here: qm list shows those that are")));
        }
        Err(no_proxmox(&self.cluster()))
    }

    /// What its definition says before the first snapshot.
    fn settings(&self) -> Result<String, QemuError> {
        let path = self.definition();
        let text = std::fs::read_to_string(&path);
        text.map_err(|error| refused(format!("{}: {error}", path.display())))
    }

    /// Refuses a VM that Proxmox is at work on.
    fn check_lock(&self) -> Result<(), QemuError> {
        self.check_unlocked(&self.settings()?)
    }

    fn check_unlocked(&self, text: &str) -> Result<(), QemuError> {
        let id = &self.id;
        match setting(text, "lock") {
            None => Ok(()),
            Some(lock) => Err(refused(format!(
                "VM {id} is locked by Proxmox ({lock}): wait for the end of that task, or, if none \
                 runs any more, qm unlock {id}"
            ))),
        }
    }

    /// Refuses a VM that Proxmox starts again where it ends.
    fn check_availability(&self) -> Result<(), QemuError> {
        let path = self.cluster().join("ha/resources.cfg");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let mut lines = text.lines().skip_while(|line| line.trim() != format!("vm: {}", self.id));
        if lines.next().is_none() {
            return Ok(());
        }
        let own = lines.take_while(|line| line.starts_with([' ', '\t']));
        let mut states = own.filter_map(|line| line.trim().strip_prefix("state "));
        match states.next().map(str::trim) {
            Some("ignored" | "disabled") => Ok(()),
            _ => Err(refused(format!(
                "VM {id} is kept up by the HA manager, which would start it again here when its \
                 guest has left: ha-manager set vm:{id} --state ignored",
                id = self.id
            ))),
        }
    }

    /// Its process.
    fn process(&self) -> Result<i32, QemuError> {
        let id = &self.id;
        let text = std::fs::read_to_string(self.run("pid")).unwrap_or_default();
        let pid = text.trim().parse::<i32>().ok();
        let line = pid.and_then(|pid| std::fs::read(format!("/proc/{pid}/cmdline")).ok());
        let words = line.unwrap_or_default();
        let words: Vec<&[u8]> = words.split(|byte| *byte == 0).collect();
        // Proxmox knows its own again by an option of its own QEMU's, -id; others have no such one.
        let file = format!("/qemu-server/{id}.pid");
        let is_own = words.windows(2).any(|pair| {
            pair[0] == b"-id" && pair[1] == id.as_bytes()
                || pair[0] == b"-pidfile" && pair[1].ends_with(file.as_bytes())
        });
        match pid {
            Some(pid) if is_own => Ok(pid),
            _ => Err(refused(format!("VM {id} does not run, so there is no guest to move"))),
        }
    }

    /// Locks it, whose guest is about to be stopped and to leave: its definition stays this node's.
    ///
    /// # Errors
    /// When somebody else has locked it, or it cannot be written.
    pub(crate) fn lock(&self) -> Result<(), QemuError> {
        let lock = |text: &str| self.check_unlocked(text).map(|()| Some(with_lock(text)));
        self.rewrite("locked", lock)
    }

    /// Takes the lock back, as the guest has not left.
    ///
    /// # Errors
    /// When that cannot be written, with the cure.
    pub(crate) fn unlock(&self) -> Result<(), QemuError> {
        self.rewrite("unlocked", |text| Ok(without_lock(text)))
            .map_err(|error| refused(format!("{error}; the guest is here: qm unlock {}", self.id)))
    }

    /// Has `change` make a new definition, or none, while Proxmox changes nothing.
    fn rewrite(
        &self,
        what: &str,
        change: impl Fn(&str) -> Result<Option<String>, QemuError>,
    ) -> Result<(), QemuError> {
        let path = self.definition();
        let failed =
            |error: io::Error| refused(format!("{} could not be {what}: {error}", path.display()));
        let _turn = self.turn().map_err(failed)?;
        let text = std::fs::read_to_string(&path).map_err(failed)?;
        let Some(text) = change(&text)? else { return Ok(()) };
        // As Proxmox writes its files: in one step.
        let new = path.with_extension(format!("conf.tmp.{}", std::process::id()));
        let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path));
        written.inspect_err(|_| drop(std::fs::remove_file(&new))).map_err(failed)
    }

    /// The right to change the definition, for as long as the file is open.
    fn turn(&self) -> io::Result<File> {
        let directory = self.root.join("var/lock/qemu-server");
        let lock = directory.join(format!("lock-{}.conf", self.id));
        let lock = File::options().append(true).create(true).open(lock)?;
        let until = Instant::now() + LOCK_LIMIT;
        while let Err(errno) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            if Instant::now() >= until {
                return Err(errno.into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(lock)
    }
}

/// What the VM `id` does, in QEMU's word.
///
/// # Errors
/// When there is no such VM, or it does not run or answer.
pub fn vm_state(id: &str) -> Result<String, QemuError> {
    let vm = ProxmoxVm::named(id)?;
    vm.process()?;
    let mut monitor = BriefMonitor::open(&vm.monitor())?;
    let monitor: &mut dyn Monitor = &mut monitor;
    Ok(monitor.run(&QueryStatus)?.status)
}

/// The value of `key` in a definition, not in one of its snapshots.
fn setting<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let own = text.lines().take_while(|line| !line.starts_with('['));
    own.filter_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(str::trim).next()
}

/// A definition that says that its VM migrates.
fn with_lock(text: &str) -> String {
    // Comments come first, and are the VM's description.
    let at = text.lines().take_while(|line| line.starts_with('#')).map(|line| line.len() + 1).sum();
    let (before, after) = text.split_at_checked(at).unwrap_or((text, ""));
    let gap = if before.is_empty() || before.ends_with('\n') { "" } else { "\n" };
    format!("{before}{gap}lock: migrate\n{after}")
}

/// A definition without that word; `None` if it does not say it.
fn without_lock(text: &str) -> Option<String> {
    let own = text.split_inclusive('\n').take_while(|line| !line.starts_with('['));
    let mut at = 0;
    for line in own {
        if line.strip_prefix("lock:").is_some_and(|lock| lock.trim() == "migrate") {
            return Some([&text[..at], &text[at + line.len()..]].concat());
        }
        at += line.len();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Proxmox has on a node, in a directory.
    struct Node(PathBuf);

    impl Node {
        fn new(name: &str) -> Self {
            let root =
                std::env::temp_dir().join(format!("godwit-pve-{name}-{}", std::process::id()));
            for directory in
                ["var/run/qemu-server", "var/lock/qemu-server", "etc/pve/ha", "etc/pve/qemu-server"]
            {
                std::fs::create_dir_all(root.join(directory)).unwrap();
            }
            std::fs::create_dir_all(root.join("etc/pve/nodes/east/qemu-server")).unwrap();
            Self(root)
        }

        fn write(&self, path: &str, text: &str) {
            std::fs::write(self.0.join(path), text).unwrap();
        }

        fn refusal(&self, id: &str) -> String {
            ProxmoxVm::under(&self.0, id).and_then(ProxmoxVm::checked).unwrap_err().to_string()
        }
    }

    impl Drop for Node {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_proxmox_has_against_a_move_is_told_with_its_cure() {
        let node = Node::new("refusals");
        assert!(node.refusal("web").contains("no number"));
        assert!(node.refusal("100").contains("there is no VM 100 here"));
        node.write("etc/pve/nodes/east/qemu-server/100.conf", "");
        assert!(node.refusal("100").contains("belongs to the node east"));
        node.write("etc/pve/qemu-server/100.conf", "cores: 1\n\n[before]\nlock: snapshot\n");
        assert!(node.refusal("100").contains("does not run"), "a snapshot's lock is its own");
        for lock in ["backup", "migrate", "snapshot"] {
            node.write("etc/pve/qemu-server/100.conf", &format!("cores: 1\nlock: {lock}\n"));
            let told = node.refusal("100");
            assert!(
                told.contains(&format!("({lock})")) && told.contains("qm unlock 100"),
                "{told}"
            );
        }
        node.write("etc/pve/qemu-server/100.conf", "cores: 1\n");
        node.write("etc/pve/ha/resources.cfg", "vm: 1000\n\tstate started\n\nvm: 100\n\tgroup a\n");
        assert!(node.refusal("100").contains("ha-manager set vm:100"));
        node.write(
            "etc/pve/ha/resources.cfg",
            "vm: 100\n\tstate ignored\n\nvm: 7\n\tstate started",
        );
        // A process that is another's by now.
        node.write("var/run/qemu-server/100.pid", &std::process::id().to_string());
        assert!(node.refusal("100").contains("does not run"));
        let none = Path::new("/nowhere");
        let told = ProxmoxVm::under(none, "100").unwrap_err().to_string();
        assert!(told.contains("no Proxmox VE here"), "{told}");
    }

    #[test]
    fn what_a_vm_needs_is_in_its_definition() {
        let text = "#cpu: words\nagent: 1\ncpu: host,flags=+aes\nide2: none,media=cdrom,size=4M\n\
                    memory: 2048\nscsi0: local:vm-100-disk-0,iothread=1,size=32G\n\
                    scsihw: virtio-scsi-single\nvirtio1: tank:b,size=512K\n[s]\nmemory: 1\n";
        let disk = |name: &str, size: &str| (name.to_owned(), size.to_owned());
        let told = outline(text);
        assert_eq!((told.memory, told.cpu.as_deref()), (Some(2048), Some("host")));
        assert_eq!(told.disks, [disk("scsi0", "32G"), disk("virtio1", "512K")]);
        let keys = outline("memory: current=512\ncpu: cputype=EPYC-Milan\n");
        assert_eq!((keys.memory, keys.cpu.as_deref()), (Some(512), Some("EPYC-Milan")));
        assert_eq!(outline("cores: 1\n"), Outline::default());
    }

    #[test]
    fn only_a_vm_whose_process_lives_runs() {
        let node = Node::new("running");
        // As one that has ended leaves it.
        node.write("var/run/qemu-server/100.pid", &std::process::id().to_string());
        assert_eq!(ProxmoxVm::that_run_under(&node.0).unwrap(), Vec::new());
        let told = ProxmoxVm::that_run_under(Path::new("/nowhere")).unwrap_err().to_string();
        assert!(told.contains("no Proxmox VE here"), "{told}");
    }

    #[test]
    fn a_vm_is_locked_before_its_guest_leaves_and_unlocked_if_it_stays() {
        let node = Node::new("locks");
        let vm = ProxmoxVm { id: "100".to_owned(), root: node.0.clone() };
        let text = || std::fs::read_to_string(vm.definition()).unwrap();
        for (before, after, back) in [
            (
                "#words\ncores: 1\n[s]\ncores: 2\n",
                "#words\nlock: migrate\ncores: 1\n[s]\ncores: 2\n",
                "#words\ncores: 1\n[s]\ncores: 2\n",
            ),
            ("cores: 1\n", "lock: migrate\ncores: 1\n", "cores: 1\n"),
            ("#words", "#words\nlock: migrate\n", "#words\n"),
            ("", "lock: migrate\n", ""),
            ("[s]\nlock: migrate\n", "lock: migrate\n[s]\nlock: migrate\n", {
                "[s]\nlock: migrate\n"
            }),
        ] {
            node.write("etc/pve/qemu-server/100.conf", before);
            vm.lock().unwrap();
            assert_eq!(text(), after);
            assert!(vm.lock().unwrap_err().to_string().contains("locked by Proxmox (migrate)"));
            vm.unlock().unwrap();
            assert_eq!(text(), back);
            vm.unlock().unwrap();
            assert_eq!(text(), back, "a snapshot's lock is its own");
        }
        let theirs = "lock: backup\ncores: 1\n";
        node.write("etc/pve/qemu-server/100.conf", theirs);
        assert!(vm.lock().unwrap_err().to_string().contains("(backup)"));
        vm.unlock().unwrap();
        assert_eq!(text(), theirs);
        let gone = ProxmoxVm { id: "101".to_owned(), ..vm };
        assert!(gone.lock().unwrap_err().to_string().contains("101.conf could not be locked"));
        assert!(gone.unlock().unwrap_err().to_string().contains("qm unlock 101"));
    }
}
