//! The processes behind vhost-user devices: who they are, what they are refused for, and whether
//! they are still the same.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use godwit_memory::RamBlock;
use godwit_track::{AddressSpace, Approach, Sharer, Sharers, TrackError};

use super::Front;
use super::attendance::{Attendant, attendants, faults};
use crate::QemuError;
use crate::clients::{self, Connection};
use crate::mark::start_time;
use crate::process::descriptors;

/// Device files by which a process has a device write memory that is not its own to copy to. The
/// device reaches it behind all page tables.
const DMA: [&str; 5] =
    ["/dev/vfio/", "/dev/uio", "/dev/vhost-vdpa", "/dev/infiniband/", "/dev/dsa/"];
/// O_DIRECT (asm-generic/fcntl.h), as fdinfo shows it.
const O_DIRECT: u64 = 0o40000;

/// A process at the other end of a vhost-user connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BackEnd {
    pub(crate) pid: i32,
    /// In ticks since the host was started.
    started: Option<u64>,
    /// The connections that it has.
    at: Vec<Connection>,
    /// Its program.
    pub(crate) program: String,
    /// What it is the back end of, for people.
    pub(crate) of: String,
    /// Whether it does direct I/O.
    lands_late: bool,
}

impl std::fmt::Display for BackEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} ({})", self.program, self.pid, self.of)
    }
}

impl BackEnd {
    fn of(pid: i32, fronts: &[Front], connections: &[&Connection]) -> Self {
        let mut of: Vec<String> = connections
            .iter()
            .map(|connection| match front_at(fronts, connection) {
                Some(front) => front.to_string(),
                None => connection.path.display().to_string(),
            })
            .collect();
        of.dedup();
        Self {
            pid,
            started: start_time(pid.cast_unsigned()),
            at: connections.iter().copied().cloned().collect(),
            program: clients::program(pid),
            of: of.join(", "),
            lands_late: false,
        }
    }

    /// Refuses a process that has a device write guest memory by itself.
    fn check(&self) -> Result<(), QemuError> {
        let dma = |what: String| QemuError::BackEndDma { back_end: self.to_string(), what };
        let files = |path: &PathBuf| {
            let text = path.to_string_lossy();
            DMA.iter().any(|device| text.starts_with(device)) || is_bar(&text)
        };
        let open = descriptors(self.pid).into_iter().flatten();
        if let Some(file) = open.filter_map(|it| it.target()).find(files) {
            return Err(dma(format!("has {} open", file.display())));
        }
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
        let pinned = pinned.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
        match pinned {
            // Buffers of an io_uring, or of RDMA: what is written there faults nothing.
            Some(kibibytes) if kibibytes > 0 => {
                Err(dma(format!("has {kibibytes} KiB of memory pinned for devices")))
            }
            _ => Ok(()),
        }
    }

    /// Whether a thread of it is in an uninterruptible wait, as for direct I/O.
    pub(crate) fn waits_for_storage(&self) -> bool {
        let tasks =
            fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten().flatten();
        tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok()).any(|stat| {
            // The state follows the name, which is in parentheses (proc_pid_stat(5)).
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'))
        })
    }

    /// Whether it does direct I/O.
    pub(crate) fn lands_late(&self) -> bool {
        self.lands_late
    }

    fn sharer(&self) -> Sharer {
        let Self { pid, lands_late, .. } = *self;
        Sharer { pid, approach: Approach::default(), lands_late }
    }
}

/// Memory of a device on the PCI bus, in sysfs.
fn is_bar(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    path.starts_with("/sys/") && name.starts_with("resource")
}

/// Whether process `pid` has a file open for direct I/O.
fn does_direct_io(pid: i32) -> bool {
    let entries = fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    let texts = entries.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    texts.into_iter().any(|text| is_direct(&text))
}

fn is_direct(fdinfo: &str) -> bool {
    let flags = fdinfo.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u64::from_str_radix(flags.trim(), 8).ok());
    // A packet-mode pipe has the same flag, and no position.
    flags.is_some_and(|flags| flags & O_DIRECT != 0)
}

/// The front that a connection is of.
fn front_at<'a>(fronts: &'a [Front], connection: &Connection) -> Option<&'a Front> {
    fronts.iter().find(|front| front.has(connection))
}

/// Who the back ends of a QEMU are, again and again.
#[derive(Debug)]
pub(crate) struct Watch {
    qemu: i32,
    fronts: Vec<Front>,
    /// Where back ends connect to QEMU.
    listening: Vec<PathBuf>,
    blocks: Arc<Vec<RamBlock>>,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    connections: Vec<Connection>,
    back_ends: Vec<BackEnd>,
    /// Those at each device when that was asked last; `None` if one had nobody.
    attendants: Option<Vec<Vec<Attendant>>>,
}

impl Seen {
    /// Whether each device that has a path has a back end, as far as is known.
    fn is_attended(&self, fronts: &[Front]) -> bool {
        let theirs = |front: &Front| {
            self.back_ends.iter().flat_map(|it| &it.at).any(|connection| front.has(connection))
        };
        fronts.iter().all(|front| front.path.is_none() || theirs(front))
    }
}

impl Watch {
    /// Of these devices of QEMU process `qemu`.
    pub(crate) fn new(qemu: i32, fronts: Vec<Front>, blocks: Arc<Vec<RamBlock>>) -> Self {
        let listening = fronts.iter().filter(|front| front.listens);
        let listening = listening.filter_map(|front| front.path.clone()).collect();
        Self { qemu, fronts, listening, blocks, seen: Mutex::default() }
    }

    /// The devices.
    pub(crate) fn fronts(&self) -> &[Front] {
        &self.fronts
    }

    /// Looks who the back ends are now: those at the other end of a vhost-user connection, and all
    /// others that QEMU is connected to, as far as they map its RAM.
    ///
    /// # Errors
    /// When one has a device write guest memory.
    pub(crate) fn look(&self) -> Result<Vec<BackEnd>, QemuError> {
        let connections = clients::connections_of(self.qemu, &self.listening)
            .map_err(|source| QemuError::System { step: "looking for QEMU's peers", source })?;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let same =
            |back_end: &BackEnd| start_time(back_end.pid.cast_unsigned()) == back_end.started;
        let known = seen.connections == connections && seen.back_ends.iter().all(same);
        if !known || !seen.is_attended(&self.fronts) {
            let own = std::process::id().cast_signed();
            let peers = clients::peers(&connections).into_iter();
            let peers = peers.filter(|(pid, _)| *pid != own && *pid != self.qemu);
            // Of a device that was plugged later, QEMU before 8.2 does not tell the path.
            let unknown = self.fronts.iter().any(|front| front.path.is_none());
            let is_one = |theirs: &[&Connection]| {
                theirs.iter().any(|connection| front_at(&self.fronts, connection).is_some())
            };
            seen.back_ends = peers
                .filter(|(pid, theirs)| {
                    unknown || is_one(theirs) || self.maps(*pid).unwrap_or(false)
                })
                .map(|(pid, theirs)| BackEnd::of(pid, &self.fronts, &theirs))
                .collect();
            seen.connections = connections;
        }
        for back_end in &mut seen.back_ends {
            back_end.check()?;
            back_end.lands_late = does_direct_io(back_end.pid);
        }
        Ok(seen.back_ends.clone())
    }

    /// The same at the first look, where each device has to have one.
    pub(crate) fn look_first(&self) -> Result<Vec<BackEnd>, QemuError> {
        let back_ends = self.look()?;
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let found: BTreeSet<String> = clients::peers(&seen.connections)
            .iter()
            .flat_map(|(_, theirs)| theirs)
            .filter_map(|connection| Some(front_at(&self.fronts, connection)?.to_string()))
            .collect();
        let hidden = |front: &&Front| {
            let there = match front.path {
                Some(_) => found.contains(&front.to_string()),
                None => !back_ends.is_empty(),
            };
            !there
        };
        match self.fronts.iter().find(hidden) {
            Some(front) if !front.connected => Err(front.refused(
                "no back end is connected to it, and one that comes may write guest memory and go \
                 before anybody has seen it: start its back end, or unplug it",
            )),
            Some(front) => Err(QemuError::BackEndHidden { what: front.to_string() }),
            None => Ok(back_ends),
        }
    }

    fn maps(&self, pid: i32) -> Result<bool, TrackError> {
        let space = AddressSpace::of(pid)?;
        Ok(self.blocks.iter().any(|block| !space.shared_parts_of(block).is_empty()))
    }

    /// The same as processes to be tracked: those that map memory. It is asked before each round.
    pub(crate) fn sharers(&self) -> Result<Sharers, String> {
        let back_ends = self.look().map_err(|error| error.to_string())?;
        let (mut who, mut looked, mut counted) = (Vec::new(), Vec::new(), true);
        for back_end in &back_ends {
            // Before its mappings, so that whatever it does from here on shows next time.
            let faults = faults(back_end.pid);
            // Whoever attaches to it tells why its mappings are not to be read.
            let maps = self.maps(back_end.pid).unwrap_or(true);
            counted &= maps || faults.is_some();
            who.extend(maps.then(|| back_end.sharer()));
            let BackEnd { pid, started, .. } = *back_end;
            let faults = faults.filter(|_| !maps);
            looked.push(Attendant { pid, started, connections: back_end.at.clone(), faults });
        }
        let now = attendants(&self.fronts, &looked).filter(|_| counted);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let steady = now.is_some() && now == seen.attendants;
        seen.attendants = now;
        Ok(Sharers { who, steady })
    }

    /// The back ends, as they were when looked at last.
    pub(crate) fn known(&self) -> Vec<BackEnd> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).back_ends.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::fs::OpenOptionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_back_end_is_found_by_the_connection_and_with_what_it_has_open() {
        let dir = std::env::temp_dir().join(format!("godwit-back-end-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = UnixStream::connect(&path).unwrap();
        let _back_end = listener.accept().unwrap();
        let own = std::process::id().cast_signed();
        let connections = clients::connections_of(own, &[]).unwrap();
        let made: Vec<_> = connections.iter().filter(|it| it.path == path).collect();
        assert_eq!(made.len(), 1, "the end that was accepted is not QEMU's");
        let accepted = clients::connections_of(own, std::slice::from_ref(&path)).unwrap();
        assert_eq!(accepted.iter().filter(|it| it.path == path).count(), 2);
        let there = clients::peers(&connections);
        assert!(there.iter().any(|(pid, theirs)| *pid == own && theirs.contains(&made[0])));
        drop(qemu);
        fs::remove_dir_all(dir).unwrap();
    }

    const SOCKET: &str = "GODWIT_TEST_BACK_END";

    /// Not a test by itself: a back end, when the environment names a socket of QEMU's.
    #[test]
    fn back_end_process() {
        let Some(socket) = std::env::var_os(SOCKET) else { return };
        let _connection = UnixStream::connect(socket).unwrap();
        for line in std::io::stdin().lines() {
            if line.unwrap() == "memory" {
                assert!(std::hint::black_box(vec![1_u8; 16 << 20]).iter().all(|byte| *byte == 1));
            }
            println!("\ndone");
        }
    }

    /// A back end of this process's, which stands for QEMU.
    struct Process(std::process::Child, #[allow(dead_code)] UnixStream);

    impl Process {
        fn connect(listener: &UnixListener, path: &Path) -> Self {
            let child = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "vhost_user::back_end::tests::back_end_process", "--nocapture"])
                .env(SOCKET, path)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut process = Self(child, listener.accept().unwrap().0);
            // Until it waits for the next line it may have page faults.
            process.tell("nothing");
            process
        }

        fn tell(&mut self, line: &str) {
            writeln!(self.0.stdin.as_mut().unwrap(), "{line}").unwrap();
            let mut stdout = BufReader::new(self.0.stdout.as_mut().unwrap());
            let mut word = String::new();
            while word.trim() != "done" {
                word.clear();
                assert_ne!(stdout.read_line(&mut word).unwrap(), 0, "the process ended");
            }
        }
    }

    impl Drop for Process {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_back_end_that_comes_and_goes_between_two_looks_is_noticed() {
        // Mutation: only those that are there are compared with those that were.
        let dir = std::env::temp_dir().join(format!("godwit-attended-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let front = Front {
            kind: "vhost-user-blk".to_owned(),
            name: "disk0".to_owned(),
            path: Some(path.clone()),
            listens: true,
            connected: false,
            virtio: None,
        };
        let own = std::process::id().cast_signed();
        let watch = Watch::new(own, vec![front], Arc::default());
        let told = watch.look_first().unwrap_err().to_string();
        assert!(told.contains("'disk0'") && told.contains("start its back end"), "{told}");
        let steady = || {
            let sharers = watch.sharers().unwrap();
            assert_eq!(sharers.who, [], "none maps memory");
            sharers.steady
        };
        assert!(!steady(), "nobody is there, and anybody may have been");
        assert!(!steady());
        drop(Process::connect(&listener, &path));
        assert!(!steady(), "it came and went");
        let mut stays = Process::connect(&listener, &path);
        assert!(!steady(), "nobody looked before it came");
        // Its page faults are at an end when it waits for more to do.
        let until = Instant::now() + Duration::from_secs(20);
        while !steady() {
            assert!(Instant::now() < until, "the same process, over the same connection");
        }
        assert_eq!(watch.look_first().unwrap().len(), 1);
        stays.tell("memory");
        assert!(!steady(), "it may have mapped memory and let go of it");
        drop(stays);
        let _other = Process::connect(&listener, &path);
        assert!(!steady(), "another in its place");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn devices_that_write_by_themselves_are_known_by_their_files() {
        let bar = "/sys/devices/pci0000:00/0000:00:05.0/resource0";
        assert!(is_bar(bar) && !is_bar("/sys/kernel/mm/hugepages") && !is_bar("/srv/resource0"));
        let pid = std::process::id().cast_signed();
        BackEnd::of(pid, &[], &[]).check().unwrap();
    }

    #[test]
    fn direct_io_shows() {
        assert!(is_direct("pos:\t0\nflags:\t02140002\nmnt_id:\t1\n"));
        assert!(!is_direct("pos:\t0\nflags:\t02100002\nmnt_id:\t1\n"));
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let open = File::options().read(true).custom_flags(0o40000).open(path);
        // Not every file system has it.
        assert!(open.is_err() || does_direct_io(std::process::id().cast_signed()));
    }
}
