//! What is in the values of options: paths, which are mapped; programs, descriptors and devices of
//! the source's host, which are refused; addresses to listen at, which must be free.
//!
//! A value is text with commas, or JSON. Both are looked through in the same way, a key and its
//! text at a time.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::mapping::{Mapping, exact_place, place};
use super::refused;
use crate::QemuError;
use crate::command_line::parts;

/// Whose value it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Machine,
    Disk,
    Device,
    Object,
    Network,
    Chardev,
    /// What a serial line or a monitor is connected to, in a word.
    Console,
    Other,
}

/// How paths of the source's are found here.
#[derive(Debug)]
pub(super) struct Places<'a> {
    pub(super) directory: &'a str,
    pub(super) mappings: &'a [Mapping],
    /// Programs that QEMU may run.
    pub(super) scripts: &'a [PathBuf],
    /// Whether files of memory are the source's own, and so must be there.
    pub(super) in_place: bool,
}

/// Keys that QEMU collects, where they are said more than once; of all others it heeds the last.
const LISTS: [&str; 6] =
    ["dnssearch", "guestfwd", "hostfwd", "plaintext-channel", "tls-channel", "value"];

/// Whether a file must be there or is made by QEMU, in a directory that must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    File,
    Directory,
}

const BY_HAND: &str = "start the destination by hand (godwit receive --vm)";

/// Keys whose text is a path, also where it begins with no /.
const PATHS: [&str; 17] = [
    "file", "filename", "path", "mem-path", "kernel", "initrd", "dtb", "firmware", "rrfile",
    "splash", "logfile", "dir", "rootdir", "bootfile", "tftp", "dumpdtb", "conf",
];
/// Keys under which descriptors are handed over.
const DESCRIPTORS: [&str; 6] = ["fd", "fds", "vhostfd", "vhostfds", "sockfd", "sock_fd"];
/// Keys whose text is a program that QEMU runs, or a service that runs one.
const PROGRAMS: [&str; 6] = ["script", "downscript", "helper", "guestfwd", "smb", "exec"];
/// Files that every host has, and that give nothing away.
const EVERYWHERE: [&str; 3] = ["/dev/urandom", "/dev/random", "/dev/null"];
/// Objects that are memory, threads or limits, and nothing of the host's; and monitors, of which
/// those that others reach are refused before.
const OBJECTS: [&str; 16] = [
    "authz-list",
    "authz-simple",
    "cryptodev-backend-builtin",
    "iothread",
    "main-loop",
    "memory-backend-file",
    "memory-backend-memfd",
    "memory-backend-ram",
    "monitor-hmp",
    "monitor-qmp",
    "rng-builtin",
    "rng-random",
    "secret",
    "thread-context",
    "throttle-group",
    "tls-creds-x509",
];
/// Character devices that are files, sockets, or nothing.
const CHARDEVS: [&str; 12] = [
    "file",
    "memory",
    "mux",
    "null",
    "pty",
    "qemu-vdagent",
    "ringbuf",
    "socket",
    "spiceport",
    "spicevmc",
    "stdio",
    "vc",
];
/// Devices that are the host's own.
const OF_THE_HOST: [&str; 12] = [
    "vfio",
    "vhost-vdpa",
    "vhost-scsi",
    "vhost-vsock",
    "usb-host",
    "scsi-generic",
    "scsi-block",
    "ivshmem",
    "u2f-",
    "ccid-",
    "tpm-",
    "xen-",
];
/// Drivers and formats of disks that need no more than a path or a network, and where disks are
/// plugged in.
const DISKS: [&str; 31] = [
    "copy-on-read",
    "file",
    "gluster",
    "host_cdrom",
    "host_device",
    "http",
    "https",
    "iscsi",
    "luks",
    "nbd",
    "null-aio",
    "null-co",
    "parallels",
    "qcow",
    "qcow2",
    "qed",
    "raw",
    "rbd",
    "throttle",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
    "floppy",
    "ide",
    "mtd",
    "none",
    "pflash",
    "scsi",
    "sd",
    "virtio",
];
/// Networks that are none of the host's own cards.
const NETWORKS: [&str; 10] =
    ["bridge", "dgram", "hubport", "nic", "none", "socket", "stream", "tap", "user", "vhost-user"];
/// What QEMU runs for a tap, or for a bridge, unless it is told what else.
const TAP_SCRIPTS: [&str; 2] = ["/etc/qemu-ifup", "/etc/qemu-ifdown"];
const BRIDGE_HELPER: &str = "/usr/lib/qemu/qemu-bridge-helper";
/// What may be said of a line beside where it goes.
const LINE_WORDS: [&str; 6] = ["server", "wait", "nodelay", "reconnect", "reconnect-ms", "telnet"];
/// Storage over the network.
const STORAGE: [&str; 6] = ["nbd", "rbd", "iscsi", "http", "https", "gluster"];

impl Places<'_> {
    /// A path of the source's as it is here.
    pub(super) fn map(&self, option: &str, path: &str, needs: Needs) -> Result<String, QemuError> {
        // It would be that of the directory in which QEMU was started.
        if path.is_empty() {
            return Err(refused(format!(
                "-{option} of the source has an empty path in it: {BY_HAND}"
            )));
        }
        if EVERYWHERE.contains(&path) {
            return Ok(path.to_owned());
        }
        if path.starts_with("/dev/fd/") || path.starts_with("/dev/fdset/") {
            return Err(descriptor(option));
        }
        let Some(here) = place(path, self.directory, self.mappings) else {
            let shown = Path::new(self.directory).join(path);
            let shown = shown.display();
            return Err(refused(format!(
                "-{option} of the source has the path {shown}, and nobody has said that it may be \
                 used here: --map {shown} if it is the same on both hosts, or --map {shown}=/NEW, \
                 or a directory above it"
            )));
        };
        // A number of some process of this host's, whatever that has there.
        if !self.in_place && here.starts_with("/proc") {
            return Err(refused(format!(
                "-{option} of the source has the path {path}, a descriptor of a process there: \
                 --map {path}=/NEW names the file that is to be in its place"
            )));
        }
        let there = match needs {
            Needs::File => here.exists(),
            Needs::Directory => here.parent().is_some_and(Path::is_dir),
        };
        let taken = here.metadata().is_ok_and(|data| data.is_file() && data.len() > 0);
        // What a QEMU has left that is killed.
        let left = option == "pidfile" && holds_a_number(&here);
        if needs == Needs::Directory && taken && !left {
            return Err(refused(format!(
                "-{option} of the source has QEMU make the file {path}, which would be {} here, \
                 and that is there already: remove it if nobody needs it, or map it elsewhere \
                 (--map)",
                here.display()
            )));
        }
        if !there {
            return Err(refused(format!(
                "-{option} of the source has the path {path}, which would be {} here, and {} is \
                 not there: make it, or map it elsewhere (--map)",
                here.display(),
                match needs {
                    Needs::File => "that",
                    Needs::Directory => "its directory",
                }
            )));
        }
        here.to_str().map(str::to_owned).ok_or_else(|| refused("a path is no text"))
    }

    /// A file of settings, which decide what QEMU does: in a directory that was named there may be
    /// files that a guest has written.
    pub(super) fn settings(&self, path: &str) -> Result<String, QemuError> {
        let here = exact_place(path, self.mappings).filter(|here| here.is_file());
        let text = here.and_then(|here| here.to_str().map(str::to_owned));
        text.ok_or_else(|| {
            refused(format!(
                "the source QEMU has settings in the file {path} (-readconfig): if this host has \
                 the same, name it by its whole path, --map {path}; if not, {BY_HAND}"
            ))
        })
    }

    /// The value of an option, with its paths mapped.
    pub(super) fn look(&self, option: &str, value: &str, kind: Kind) -> Result<String, QemuError> {
        if kind == Kind::Console {
            return self.console(option, value);
        }
        if value.starts_with('{') {
            let unclear = |_| refused(format!("-{option} of the source is no JSON: {value}"));
            let mut json: Value = serde_json::from_str(value).map_err(unclear)?;
            let driver = ["driver", "qom-type", "backend", "type"];
            let driver = driver.iter().find_map(|key| json[*key].as_str()).unwrap_or_default();
            let driver = driver.to_owned();
            check_kind(option, &driver, kind)?;
            self.json(option, "", &mut json, kind)?;
            self.check_scripts(option, &driver, kind, &|key| json.get(key).is_some())?;
            return Ok(json.to_string());
        }
        let (mut texts, mut kinds) = (Vec::new(), Vec::new());
        let all = parts(value);
        check_once(option, &all)?;
        let listening = listens(&all);
        let again = all.iter().any(|part| part.starts_with("reconnect"));
        let calls = kind == Kind::Chardev && all[0] == "socket" && !listening;
        let has = |key: &str| crate::command_line::key(&all, key).is_some();
        for (number, part) in all.iter().enumerate() {
            let (key, text) = part.split_once('=').unwrap_or(("", part));
            check_key(option, if key.is_empty() && number > 0 { text } else { key })?;
            let names = key.is_empty() && number == 0
                || matches!(key, "driver" | "qom-type" | "backend" | "type" | "if" | "format")
                || key.ends_with(".driver");
            if names {
                check_kind(option, text, kind)?;
                kinds.push(text);
            }
            // Whom QEMU calls must be there, a vhost-user back end for example.
            let mapped = match calls && key == "path" {
                true => self.called(option, text, !again)?,
                false => self.text(option, key, text, kind)?,
            };
            if listening && kind == Kind::Chardev && key == "path" {
                check_free(&mapped)?;
            }
            let mapped = mapped.replace(',', ",,");
            texts.push(if key.is_empty() { mapped } else { format!("{key}={mapped}") });
        }
        kinds.iter().try_for_each(|name| self.check_scripts(option, name, kind, &has))?;
        if listening && kind == Kind::Chardev {
            let of = |key: &str| crate::command_line::key(&all, key);
            check_free_port(of("host").as_deref().unwrap_or(""), of("port").as_deref())?;
        }
        Ok(texts.join(","))
    }

    /// The socket of somebody whom QEMU calls, who is to be there if it calls `now`: named itself,
    /// since in a directory of sockets there may be monitors.
    fn called(&self, option: &str, path: &str, now: bool) -> Result<String, QemuError> {
        let here = exact_place(path, self.mappings).filter(|here| !now || here.exists());
        let text = here.and_then(|here| here.to_str().map(str::to_owned));
        text.ok_or_else(|| {
            refused(format!(
                "-{option} of the source has QEMU connect to the socket {path}: if that is to be \
                 so here, name the very socket, --map {path} or --map {path}=/NEW, and have it \
                 there"
            ))
        })
    }

    /// Refuses a network for which QEMU would run programs of its own choice.
    fn check_scripts(
        &self,
        option: &str,
        name: &str,
        kind: Kind,
        has: &dyn Fn(&str) -> bool,
    ) -> Result<(), QemuError> {
        let named = |path: &str| self.scripts.iter().any(|script| script == Path::new(path));
        let missing = match (kind, name) {
            (Kind::Network, "tap") if !has("helper") && !has("fd") && !has("fds") => {
                ["script", "downscript"]
                    .into_iter()
                    .zip(TAP_SCRIPTS)
                    .find(|(key, path)| !has(key) && !named(path))
                    .map(|(_, path)| path)
            }
            (Kind::Network, "bridge") if !has("helper") && !named(BRIDGE_HELPER) => {
                Some(BRIDGE_HELPER)
            }
            _ => None,
        };
        missing.map_or(Ok(()), |path| {
            Err(refused(format!(
                "-{option} {name} of the source has QEMU run {path}, and nobody has said that it \
                 may run here: --script {path}"
            )))
        })
    }

    fn json(&self, option: &str, key: &str, json: &mut Value, kind: Kind) -> Result<(), QemuError> {
        match json {
            Value::String(text) => {
                if matches!(key, "driver" | "qom-type" | "format") {
                    check_kind(option, text, kind)?;
                }
                *text = self.text(option, key, text, kind)?;
            }
            Value::Array(list) => {
                list.iter_mut().try_for_each(|item| self.json(option, key, item, kind))?;
            }
            Value::Object(map) => {
                for (key, value) in map.iter_mut() {
                    check_key(option, key)?;
                    self.json(option, key, value, kind)?;
                }
            }
            Value::Number(_) if is_descriptor(key) => return Err(descriptor(option)),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
        Ok(())
    }

    /// One text under a key.
    fn text(&self, option: &str, key: &str, text: &str, kind: Kind) -> Result<String, QemuError> {
        let last = key.rsplit('.').next().unwrap_or(key);
        if is_descriptor(last) || kind == Kind::Network && last == "str" {
            return Err(descriptor(option));
        }
        if PROGRAMS.contains(&last) && !matches!(text, "no" | "") {
            // Not one that has the name somewhere in it, or arguments of the source's choice.
            if self.scripts.iter().any(|named| named == Path::new(text)) {
                return Ok(text.to_owned());
            }
            return Err(refused(format!(
                "-{option} of the source has QEMU run a program ({key}={text}), and nobody has \
                 said that it may run here: --script {text}, if it is a program of this host's"
            )));
        }
        if kind == Kind::Disk && last == "locking" && text != "auto" && text != "on" {
            return Err(refused(format!(
                "-{option} of the source opens a disk without a lock ({key}={text}), by which two \
                 machines could have it at once: start the VM without"
            )));
        }
        let needs = match (kind, last) {
            (_, "path") if option == "audiodev" => Needs::Directory,
            (Kind::Object, "mem-path") if self.in_place => Needs::File,
            (Kind::Object, "mem-path") | (Kind::Chardev | Kind::Console, _) | (_, "logfile") => {
                Needs::Directory
            }
            _ => Needs::File,
        };
        if text.starts_with('/') {
            return self.map(option, text, needs);
        }
        // A path without a / in front would be one of QEMU's own directory here.
        let over_network = |scheme: &str| kind == Kind::Disk && STORAGE.contains(&scheme);
        let inner =
            text.contains('/') && !text.split_once("://").is_some_and(|(it, _)| over_network(it));
        let looked = matches!(kind, Kind::Device | Kind::Object | Kind::Chardev | Kind::Machine);
        let leaves = text.split('/').any(|part| part == "..");
        if inner && (leaves || last != "serial" && (looked || option == "global")) {
            return self.map(option, text, needs);
        }
        // Where a socket is, above all; what is behind two slashes is a host.
        if let (false, Some((scheme, path))) =
            (matches!(last, "string" | "value"), text.split_once(':'))
            && (scheme == "unix" || path.starts_with('/') && !path.starts_with("//"))
        {
            return match scheme {
                "unix" => Ok(format!("unix:{}", self.map(option, path, Needs::Directory)?)),
                "file" => Ok(format!("file:{}", self.map(option, path, needs)?)),
                _ => Err(refused(format!("-{option} of the source has '{text}' in it: {BY_HAND}"))),
            };
        }
        if !PATHS.contains(&last) {
            return Ok(text.to_owned());
        }
        match (kind, text.split_once(':')) {
            (Kind::Disk, Some(("file", path))) => {
                Ok(format!("file:{}", self.map(option, path, needs)?))
            }
            (Kind::Disk, Some((scheme, rest)))
                if STORAGE.contains(&scheme)
                    && !rest.starts_with("unix:")
                    && !(scheme == "rbd" && rest.contains(':')) =>
            {
                Ok(text.to_owned())
            }
            (Kind::Disk, Some((scheme, rest))) if !scheme.contains('/') && !rest.is_empty() => {
                Err(refused(format!(
                    "-{option} of the source has storage of a kind that is not carried ({text}): \
                     {BY_HAND}"
                )))
            }
            _ => self.map(option, text, needs),
        }
    }

    /// What a serial line or a monitor is connected to.
    fn console(&self, option: &str, value: &str) -> Result<String, QemuError> {
        let (prefix, rest) = match value.strip_prefix("mon:") {
            Some(rest) => ("mon:", rest),
            None => ("", value),
        };
        let mut words = parts(rest);
        check_once(option, &words)?;
        for word in &words[1..] {
            let (key, text) = word.split_once('=').unwrap_or((word, ""));
            if !LINE_WORDS.contains(&key) || !text.chars().all(|c| c.is_ascii_alphanumeric()) {
                return Err(refused(format!(
                    "-{option} of the source has '{word}' in it, which is not carried: {BY_HAND}"
                )));
            }
        }
        let monitor = !prefix.is_empty() || matches!(option, "monitor" | "qmp" | "qmp-pretty");
        let listening = listens(&words);
        let of_this_host = match rest.split_once(':') {
            Some(("unix", _)) => listening,
            Some(("chardev", _)) => true,
            _ => matches!(rest, "none" | "null" | "stdio"),
        };
        if monitor && !of_this_host {
            return Err(monitor_of_others(option, value));
        }
        let first = words.first().cloned().unwrap_or_default();
        match first.split_once(':') {
            None if matches!(
                first.as_str(),
                "none" | "null" | "stdio" | "vc" | "pty" | "ringbuf"
            ) => {}
            Some(("chardev" | "vc" | "ringbuf" | "null", _)) => {}
            Some(("file", _)) if words.len() > 1 => {
                return Err(refused(format!(
                    "-{option} of the source is a file with a comma in its name: {BY_HAND}"
                )));
            }
            Some((kind @ ("file" | "unix"), path)) => {
                let path = match kind == "unix" && !listening {
                    true => self.called(option, path, true)?,
                    false => self.map(option, path, Needs::Directory)?,
                };
                if kind == "unix" && listening {
                    check_free(&path)?;
                }
                words[0] = format!("{kind}:{path}");
            }
            Some(("tcp" | "telnet" | "websocket", at)) => {
                if listening {
                    let (host, port) = at.rsplit_once(':').unwrap_or(("", at));
                    check_free_port(host, Some(port))?;
                }
            }
            Some(("udp", _)) => {}
            _ => {
                return Err(refused(format!(
                    "-{option} {value} of the source is a line of its own host: {BY_HAND}"
                )));
            }
        }
        let words: Vec<String> = words.iter().map(|word| word.replace(',', ",,")).collect();
        Ok(format!("{prefix}{}", words.join(",")))
    }
}

/// A monitor that is reached from elsewhere decides what this host runs.
pub(super) fn monitor_of_others(option: &str, value: &str) -> QemuError {
    refused(format!(
        "-{option} {value} of the source is a monitor that is no unix socket of its host's: who \
         reaches it has QEMU run and open what he likes; {BY_HAND}"
    ))
}

/// Refuses what QEMU would take for something else than was looked at.
fn check_key(option: &str, key: &str) -> Result<(), QemuError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    match key.chars().all(fits) {
        true => Ok(()),
        false => Err(refused(format!("-{option} of the source has a key that is none: '{key}'"))),
    }
}

/// Refuses a key that is said twice: QEMU heeds the last, and what is looked for here is the first.
fn check_once(option: &str, all: &[String]) -> Result<(), QemuError> {
    let keys = all.iter().skip(1).map(|part| part.split_once('=').map_or(&**part, |(key, _)| key));
    let first = all.first().and_then(|part| part.split_once('=')).map(|(key, _)| key);
    let is_list = |key: &str| LISTS.contains(&key) || option == "smbios" && key == "path";
    let mut seen = BTreeSet::from_iter(first);
    match keys.filter(|key| !is_list(key)).find(|key| !seen.insert(*key)) {
        None => Ok(()),
        Some(key) => Err(refused(format!(
            "-{option} of the source says '{key}' twice, of which QEMU heeds the last alone: leave \
             the other out"
        ))),
    }
}

fn is_descriptor(key: &str) -> bool {
    DESCRIPTORS.contains(&key)
}

fn descriptor(option: &str) -> QemuError {
    refused(format!(
        "-{option} of the source has a descriptor that whoever started that QEMU has handed over: \
         have that program start the destination (godwit receive --vm)"
    ))
}

/// Refuses kinds of things that are not known to be harmless here.
fn check_kind(option: &str, name: &str, kind: Kind) -> Result<(), QemuError> {
    let starts = |list: &[&str]| list.iter().any(|it| name.starts_with(it));
    let fits = match kind {
        Kind::Object => OBJECTS.contains(&name),
        Kind::Chardev => CHARDEVS.contains(&name),
        Kind::Device => !starts(&OF_THE_HOST),
        Kind::Network => NETWORKS.contains(&name),
        Kind::Disk => DISKS.contains(&name),
        // It has the desktop start a program.
        Kind::Other => !(option == "display" && name.starts_with("spice-app")),
        Kind::Machine | Kind::Console => true,
    };
    if fits {
        return Ok(());
    }
    Err(refused(format!(
        "-{option} {name} of the source is not carried, since it may be a part of its host or \
         reach into this one: {BY_HAND}"
    )))
}

/// Whether a file is as short as a number, and holds one.
fn holds_a_number(path: &Path) -> bool {
    let short = path.metadata().is_ok_and(|data| data.len() < 16);
    let text = if short { std::fs::read_to_string(path) } else { return false };
    text.is_ok_and(|text| text.trim().parse::<u32>().is_ok())
}

/// Whether QEMU listens at a line that is described so.
fn listens(words: &[String]) -> bool {
    words.iter().any(|word| matches!(word.as_str(), "server" | "server=on"))
}

/// Refuses the path of a socket at which somebody listens.
fn check_free(path: &str) -> Result<(), QemuError> {
    match UnixStream::connect(path) {
        Err(_) => Ok(()),
        Ok(_) => Err(refused(format!(
            "somebody listens at {path} already, where the destination QEMU is to: map it \
             elsewhere (--map), or end that program"
        ))),
    }
}

/// Refuses a port at which somebody listens. A name of the source's is not looked up: QEMU says
/// itself what stands against it.
fn check_free_port(host: &str, port: Option<&str>) -> Result<(), QemuError> {
    let Some(port) = port.and_then(|port| port.parse::<u16>().ok()) else { return Ok(()) };
    let host = match host {
        "" => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
        other => match other.parse() {
            Ok(address) => address,
            Err(_) => return Ok(()),
        },
    };
    match TcpListener::bind((host, port)) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(refused(format!(
            "somebody listens at {host}:{port} already, where the destination QEMU is to: end that \
             program, or {BY_HAND}"
        ))),
        // QEMU says itself what else stands against it.
        _ => Ok(()),
    }
}
