//! The vhost-user devices of a QEMU, and what stands against moving them.

use std::path::{Path, PathBuf};

use crate::QemuError;
use crate::clients::Connection;
use crate::machine::{Machine, Plugged};
use crate::monitor::commands::{
    ENDS_WHEN_ASKED, Human, QomGet, QomList, QueryChardev, QueryVirtio, VirtioState, VirtioStatus,
};

/// Devices whose back ends have no state beside the queues: all else is in the guest's memory, in
/// QEMU or on the disk.
const STATELESS: [&str; 4] = ["vhost-user-blk", "vhost-user-scsi", "vhost-user-rng", NET];
const NET: &str = "vhost-user-net";
/// Why QEMU would not migrate: it could not learn what the back end writes (vhost_dev_init in
/// hw/virtio/vhost.c, vhost_user_backend_init in hw/virtio/vhost-user.c). Godwit learns it without.
const NO_LOG: [&str; 3] = [
    "Migration disabled: vhost lacks VHOST_F_LOG_ALL feature.",
    "Migration disabled: vhost-user backend lacks VHOST_USER_PROTOCOL_F_LOG_SHMFD feature.",
    "Migration disabled: failed to allocate shared memory",
];
/// What the back end of a file system needs so that QEMU can hand over its open files.
const DEVICE_STATE: &str = "DEVICE_STATE";

/// A device, a netdev or an object that has a back end in another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Front {
    /// `vhost-user-blk`, for example, and `vhost-user-net` of a netdev.
    pub(crate) kind: String,
    /// The id of the device or netdev.
    pub(crate) name: String,
    /// Where the two are connected, as far as QEMU tells.
    pub(crate) path: Option<PathBuf>,
    /// Whether QEMU listens there, and not the back end.
    pub(crate) listens: bool,
    /// Whether they are connected now.
    pub(crate) connected: bool,
    /// The guest's device, for what QEMU knows of its queues.
    pub(crate) virtio: Option<String>,
}

impl std::fmt::Display for Front {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} '{}'", self.kind, self.name)
    }
}

impl Front {
    /// Whether a connection is its own, as far as QEMU tells its path.
    pub(super) fn has(&self, connection: &Connection) -> bool {
        let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        self.path
            .as_ref()
            .is_some_and(|path| *path == connection.path || real(path) == real(&connection.path))
    }

    fn is_stateless(&self) -> bool {
        STATELESS.contains(&self.kind.as_str())
    }

    pub(super) fn refused(&self, why: &str) -> QemuError {
        QemuError::VhostUser { what: self.to_string(), why: why.to_owned() }
    }

    /// Refuses a device whose queues or state cannot be followed.
    fn check(&self, machine: &mut Machine) -> Result<(), QemuError> {
        let Some(virtio) = &self.virtio else {
            return Err(self.refused(
                "QEMU does not tell of its queues (x-query-virtio), so nobody can see that its \
                 back end has finished when the guest is stopped: unplug it before the migration",
            ));
        };
        if machine.qmp.run(&QomGet::<bool>::new(virtio, "iommu_platform"))? {
            return Err(self.refused(
                "it is behind an IOMMU (iommu_platform=on), which hides where its queues are: \
                 start the VM without",
            ));
        }
        if self.kind != "vhost-user-fs" {
            return Ok(());
        }
        if machine.qmp.version() >= ENDS_WHEN_ASKED {
            return Err(self.refused(
                "the files that its back end has open may be lost: whether QEMU hands them over \
                 cannot be asked of this version, which would end for it (x-query-virtio-status): \
                 unmount it in the guest and unplug it",
            ));
        }
        let VirtioState { vhost_dev } = machine.qmp.run(&VirtioStatus { path: virtio })?;
        let features = vhost_dev.map(|dev| dev.protocol_features.to_string()).unwrap_or_default();
        if !features.contains(DEVICE_STATE) {
            return Err(self.refused(
                "the files that its back end has open would be lost \
                 (VHOST_USER_PROTOCOL_F_DEVICE_STATE is missing): unmount it in the guest and \
                 unplug it",
            ));
        }
        Ok(())
    }
}

/// Refuses what QEMU itself would not migrate, with its words. A back end without a log is no
/// hindrance, where it has no state.
pub(crate) fn check_blockers(reasons: Vec<String>, fronts: &[Front]) -> Result<(), QemuError> {
    for reason in reasons {
        if !NO_LOG.contains(&reason.trim()) || fronts.is_empty() {
            return Err(QemuError::Blocked(reason));
        }
        if let Some(front) = fronts.iter().find(|front| !front.is_stateless()) {
            return Err(front.refused(&format!(
                "QEMU does not migrate it ({}), and godwit does not know that its back end has no \
                 state that would be lost: unplug it before the migration",
                reason.trim().trim_end_matches('.')
            )));
        }
    }
    Ok(())
}

/// All vhost-user devices of a machine with these `devices`, each of which may move.
pub(crate) fn fronts(machine: &mut Machine, devices: &[Plugged]) -> Result<Vec<Front>, QemuError> {
    let mut named = Vec::new();
    for (bus, name, kind) in devices {
        if kind.contains("vhost-user") {
            let path = format!("{bus}/{name}");
            let chardev = machine.qmp.run_if_known(&QomGet::<String>::new(&path, "chardev"))?;
            named.push((without_bus(kind).to_owned(), name.clone(), chardev, Some(path)));
        }
    }
    // Network back ends are no objects; only the human monitor lists them.
    let network = machine.qmp.run(&Human { command_line: "info network" })?;
    for (name, chardev) in netdevs(&network) {
        let mut device = None;
        for (bus, id, kind) in devices {
            let path = format!("{bus}/{id}");
            if kind.starts_with("virtio-net")
                && machine.qmp.run_if_known(&QomGet::<String>::new(&path, "netdev"))?.as_deref()
                    == Some(name.as_str())
            {
                device = Some(path);
            }
        }
        named.push((NET.to_owned(), name, Some(chardev), device));
    }
    // Of virtio-crypto, and of devices that share a back end.
    for child in machine.qmp.run(&QomList { path: "/objects" })? {
        if child.kind.contains("vhost-user") {
            let kind = child.kind.trim_start_matches("child<").trim_end_matches('>').to_owned();
            named.push((kind, child.name, None, None));
        }
    }
    if named.is_empty() {
        return Ok(Vec::new());
    }
    let chardevs = machine.qmp.run(&QueryChardev)?;
    let virtio = machine.qmp.run_if_known(&QueryVirtio)?.unwrap_or_default();
    let line = std::fs::read(format!("/proc/{}/cmdline", machine.pid)).unwrap_or_default();
    let mut fronts = Vec::new();
    for (kind, name, chardev, device) in named {
        let label = chardev.unwrap_or_default();
        let filename = chardevs.iter().find(|chardev| chardev.label == label);
        let filename = filename.map_or(label.as_str(), |chardev| &chardev.filename);
        let socket = Socket::parse(filename);
        let path = socket.path.or_else(|| path_of(&line, &label));
        let virtio = device.and_then(|device| {
            let mut below = virtio.iter().filter(|it| it.path.starts_with(&format!("{device}/")));
            below.next().map(|it| it.path.clone())
        });
        let Socket { listens, connected, .. } = socket;
        fronts.push(Front { kind, name, path, listens, connected, virtio });
    }
    fronts.iter().try_for_each(|front| front.check(machine))?;
    Ok(fronts)
}

/// The type of a device without its bus.
fn without_bus(kind: &str) -> &str {
    let parts = ["-pci-non-transitional", "-pci-transitional", "-pci", "-ccw", "-device"];
    parts.iter().find_map(|bus| kind.strip_suffix(bus)).unwrap_or(kind)
}

/// The vhost-user netdevs that `info network` lists (`qemu_set_info_str` in net/vhost-user.c and
/// net/passt.c), each with its chardev, or with the path of its socket.
fn netdevs(text: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    for line in text.lines().filter(|line| line.contains("vhost-user")) {
        let line = line.trim().trim_start_matches('\\').trim();
        let Some((name, rest)) = line.split_once(':') else { continue };
        let to = rest.rsplit_once(" to ").map_or("", |(_, to)| to.trim());
        // A line for each of its queues.
        if !found.iter().any(|(known, _)| known == name) {
            found.push((name.to_owned(), to.to_owned()));
        }
    }
    found
}

/// What QEMU says of the socket of a chardev.
#[derive(Debug, PartialEq, Eq)]
struct Socket {
    path: Option<PathBuf>,
    listens: bool,
    connected: bool,
}

impl Socket {
    /// `disconnected:unix:PATH,server=on` and parts of it (`qemu_chr_compute_filename` in
    /// chardev/char-socket.c). QEMU before 8.2 has no path for one that it has connected.
    fn parse(filename: &str) -> Self {
        let socket = filename.strip_prefix("disconnected:");
        let connected = socket.is_none();
        let socket = socket.unwrap_or(filename);
        let listens = [",server=on", ",server"].into_iter().any(|end| socket.ends_with(end));
        let path = socket.strip_prefix("unix:").unwrap_or(socket);
        let path = path.split_once(",server").map_or(path, |(path, _)| path);
        let path = (!path.is_empty() && path.contains('/')).then(|| PathBuf::from(path));
        Self { path, listens, connected }
    }
}

/// The path of the chardev called `label` on a command line (`-chardev socket,id=…,path=…`).
fn path_of(line: &[u8], label: &str) -> Option<PathBuf> {
    let arguments: Vec<&str> =
        line.split(|byte| *byte == 0).filter_map(|word| std::str::from_utf8(word).ok()).collect();
    let chardevs = arguments.windows(2).filter(|pair| pair[0].trim_start_matches('-') == "chardev");
    let value = |options: &str, key: &str| {
        options.split(',').find_map(|option| Some(option.strip_prefix(key)?.to_owned()))
    };
    let mut wanted = chardevs.filter(|pair| value(pair[1], "id=").as_deref() == Some(label));
    Some(Path::new(&value(wanted.next()?[1], "path=")?).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn front(kind: &str) -> Front {
        Front {
            kind: kind.to_owned(),
            name: "it".to_owned(),
            path: None,
            listens: false,
            connected: true,
            virtio: None,
        }
    }

    #[test]
    fn only_the_want_of_a_log_is_passed_over_and_only_without_state() {
        let told = |reason: &str, kinds: &[&str]| {
            let fronts: Vec<Front> = kinds.iter().map(|kind| front(kind)).collect();
            check_blockers(vec![reason.to_owned()], &fronts).map_err(|error| error.to_string())
        };
        for reason in NO_LOG {
            assert_eq!(told(reason, &["vhost-user-blk", "vhost-user-net"]), Ok(()));
            let other = told(reason, &["vhost-user-blk", "vhost-user-gpu"]).unwrap_err();
            assert!(other.contains("vhost-user-gpu 'it'") && other.contains("state"), "{other}");
            // A vhost device of the kernel's.
            assert!(told(reason, &[]).unwrap_err().contains("cannot be migrated now"));
        }
        let other = "non-migratable device: 0000:00:01.0/vhost-user-fs";
        assert!(told(other, &["vhost-user-fs"]).unwrap_err().contains(other));
        assert!(check_blockers(Vec::new(), &[front("vhost-user-fs")]).is_ok());
    }

    #[test]
    fn the_socket_of_a_chardev_is_found_in_what_qemu_tells() {
        let socket = |path: Option<&str>, listens, connected| Socket {
            path: path.map(PathBuf::from),
            listens,
            connected,
        };
        for (filename, expected) in [
            ("unix:/run/a,server=on", socket(Some("/run/a"), true, true)),
            ("disconnected:unix:/run/a,server=on", socket(Some("/run/a"), true, false)),
            ("unix:/run/a", socket(Some("/run/a"), false, true)),
            ("unix:", socket(None, false, true)),
            ("disconnected:unix:/run/a", socket(Some("/run/a"), false, false)),
            ("/tmp/passt_1.socket", socket(Some("/tmp/passt_1.socket"), false, true)),
        ] {
            assert_eq!(Socket::parse(filename), expected, "{filename}");
        }
        let line =
            b"qemu\0-chardev\0socket,id=char0,path=/run/a,reconnect=1\0-chardev\0null,id=b\0";
        assert_eq!(path_of(line, "char0"), Some("/run/a".into()));
        assert_eq!(path_of(line, "b"), None);
    }

    #[test]
    fn netdevs_are_found_once_each() {
        let text = "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci\n \
            \\ net0: index=0,type=vhost-user,vhost-user0 to char0\n \
            \\ net0: index=1,type=vhost-user,vhost-user1 to char0\n\
            net1: index=0,type=passt,vhost-user to /tmp/passt_1.socket\n\
            net2: index=0,type=user,net=10.0.2.0\n";
        let found = netdevs(text);
        let expected = [("net0", "char0"), ("net1", "/tmp/passt_1.socket")];
        assert_eq!(found, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
        assert_eq!(without_bus("vhost-user-blk-pci"), "vhost-user-blk");
        assert_eq!(without_bus("vhost-user-blk-pci-non-transitional"), "vhost-user-blk");
        assert_eq!(without_bus("vhost-user-device"), "vhost-user");
    }
}
