//! The `--vm` argument: which machine, reached how, and what can come of a request to one.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use godwit_control::client;
use godwit_engine::Failure;
use godwit_qemu::monitor::QmpError;
use godwit_qemu::{QemuError, QemuSource};

/// A machine as named on the command line.
#[derive(Clone, Debug)]
pub(crate) enum VmName {
    /// A QEMU, by the unix socket of a QMP monitor.
    Qemu(PathBuf),
    /// A domain of libvirt's, by its name, which a destination is told by the source, and where
    /// that libvirt is.
    Libvirt {
        /// Its name; empty for a destination.
        domain: String,
        /// The address of the daemon; without one, libvirt's own default.
        uri: Option<String>,
    },
    /// A VM of Proxmox's, by its number.
    Proxmox(String),
    /// A microvm, by its control socket.
    Microvm(PathBuf),
}

/// `path`, for a process that may be in another directory.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Where libvirt is, if nobody says it: where `virsh` looks as root, or is told to.
pub(crate) fn libvirt_uri(uri: Option<&str>) -> String {
    let told = || std::env::var("LIBVIRT_DEFAULT_URI").ok().filter(|uri| !uri.is_empty());
    uri.map(str::to_owned).or_else(told).unwrap_or_else(|| "qemu:///system".to_owned())
}

/// Parts `DOMAIN@URI`. Both may have an @ in them; an address has a scheme behind it.
fn libvirt(text: &str) -> VmName {
    let at = text.match_indices('@').map(|(at, _)| at).find(|at| {
        let scheme = text[at + 1..].split("://").next().unwrap_or_default();
        let fits = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
        text[at + 1..].contains("://") && !scheme.is_empty() && scheme.chars().all(fits)
    });
    let (domain, uri) = match at {
        Some(at) => (&text[..at], Some(text[at + 1..].to_owned())),
        None => (text, None),
    };
    VmName::Libvirt { domain: domain.to_owned(), uri }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qemu(path) => write!(f, "qemu:{}", path.display()),
            Self::Libvirt { domain, uri: None } => write!(f, "libvirt:{domain}"),
            Self::Libvirt { domain, uri: Some(uri) } => write!(f, "libvirt:{domain}@{uri}"),
            Self::Proxmox(id) => write!(f, "proxmox:{id}"),
            Self::Microvm(path) => write!(f, "microvm:{}", path.display()),
        }
    }
}

impl VmName {
    /// The QEMU of that name, to be looked at.
    pub(crate) fn source(&self) -> Result<QemuSource, Box<dyn Error>> {
        let opened = match self {
            Self::Qemu(path) => {
                QemuSource::open(path).map_err(|error| refused_qemu(path, error))?
            }
            Self::Libvirt { domain, uri } => {
                domain_wanted(domain)?;
                QemuSource::open_domain(domain, &libvirt_uri(uri.as_deref()), false)?
            }
            Self::Proxmox(id) => QemuSource::open_proxmox(id)?,
            Self::Microvm(_) => return Err("a microvm is no QEMU".into()),
        };
        Ok(opened.whole()?)
    }
}

impl FromStr for VmName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("qemu", path)) if !path.is_empty() => Ok(Self::Qemu(path.into())),
            Some(("microvm", path)) if !path.is_empty() => Ok(Self::Microvm(path.into())),
            Some(("libvirt", rest)) => Ok(libvirt(rest)),
            Some(("proxmox", id)) if !id.is_empty() => Ok(Self::Proxmox(id.to_owned())),
            Some(("incus", name)) if !name.is_empty() => {
                let monitor = godwit_qemu::monitor_of_instance(name);
                monitor.map(Self::Qemu).map_err(|error| error.to_string())
            }
            Some(("pid", number)) => match number.parse() {
                Ok(pid) if pid > 0 => match godwit_qemu::monitor_of(pid) {
                    Ok(path) => Ok(Self::Qemu(path)),
                    Err(error @ QemuError::MonitorsInUse { .. }) => Err(in_use(error)),
                    Err(error) => Err(error.to_string()),
                },
                _ => Err(format!("'{number}' is no process number: write pid:1234")),
            },
            _ => {
                let cure = "write qemu:PATH, where PATH is the unix socket of a QMP monitor (QEMU \
                            option -qmp unix:PATH,server=on,wait=off), pid:N, where N is the \
                            process of a QEMU that has such a monitor, libvirt:DOMAIN or \
                            libvirt:DOMAIN@URI, proxmox:ID, incus:NAME, or \
                            microvm:PATH, where PATH is the control socket \
                            (godwit microvm run --control PATH)";
                Err(cure.to_owned())
            }
        }
    }
}

/// Why the QEMU behind the monitor `path` was refused; where the monitor is busy, with whom.
pub(crate) fn refused_qemu(path: &Path, error: QemuError) -> Box<dyn Error> {
    match &error {
        QemuError::Qmp(QmpError::NoGreeting { .. }) | QemuError::MonitorBusy { .. } => {
            busy_godwit(path).map_or_else(|| error.into(), Into::into)
        }
        _ => error.into(),
    }
}

/// Why no monitor of a QEMU can be had; where another godwit has one, which.
fn in_use(error: QemuError) -> String {
    let busy = match &error {
        QemuError::MonitorsInUse { paths, .. } => paths.iter().find_map(|path| busy_godwit(path)),
        _ => None,
    };
    busy.unwrap_or_else(|| error.to_string())
}

/// Which godwit is at work at the monitor `path`, and what to do, in words.
fn busy_godwit(path: &Path) -> Option<String> {
    let (pid, command) = busy_with(path)?;
    let cure = match command.as_str() {
        "migrate" => format!("wait for it, or end it with `godwit cancel --migration {pid}`"),
        _ => format!("wait for it, or end it (kill {pid})"),
    };
    let path = path.display();
    Some(format!(
        "process {pid} (godwit {command}) is at work at the monitor {path} already: {cure}"
    ))
}

/// Another godwit that was started for the QEMU behind the monitor `path`: its process, and what it
/// does.
fn busy_with(path: &Path) -> Option<(u32, String)> {
    let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let wanted = real(path);
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let others = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    others.filter(|pid| *pid != std::process::id()).find_map(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let words: Vec<_> = line.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        let godwit = words.first()?.rsplit('/').next() == Some("godwit");
        let vm = |kind: &str| {
            words.iter().find_map(|word| {
                let name = word.strip_prefix("--vm=").unwrap_or(word);
                name.strip_prefix(kind).map(str::to_owned)
            })
        };
        let has_it = match (vm("qemu:"), vm("pid:")) {
            // A relative path is one of that process, whose directory may be another.
            (Some(vm), _) if !Path::new(&vm).is_absolute() => {
                real(&std::fs::read_link(format!("/proc/{pid}/cwd")).ok()?.join(vm)) == wanted
            }
            (Some(vm), _) => real(Path::new(&vm)) == wanted,
            (None, Some(number)) => {
                let monitors = godwit_qemu::monitors_of(number.parse().ok()?).unwrap_or_default();
                monitors.iter().any(|(path, in_use)| *in_use && real(path) == wanted)
            }
            (None, None) => false,
        };
        (godwit && has_it).then(|| (pid, words.get(1).map(ToString::to_string).unwrap_or_default()))
    })
}

/// Why a request to a machine came to nothing.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// Nothing began.
    Refused(Box<dyn Error>),
    /// A migration began and failed.
    Failed(Failure),
}

impl From<client::RequestError> for RequestError {
    fn from(error: client::RequestError) -> Self {
        match error {
            client::RequestError::Refused(error) => Self::Refused(error.into()),
            client::RequestError::Failed(failure) => Self::Failed(failure),
        }
    }
}

/// Why a source needs the name of a domain.
pub(crate) fn domain_wanted(domain: &str) -> Result<(), Box<dyn Error>> {
    if domain.is_empty() {
        return Err("libvirt: which domain? Write libvirt:DOMAIN or libvirt:DOMAIN@URI".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_parted_from_the_address_of_its_libvirt() {
        let parted = |text: &str| match text.parse() {
            Ok(VmName::Libvirt { domain, uri }) => (domain, uri.unwrap_or_default()),
            other => panic!("{other:?}"),
        };
        let pair = |domain: &str, uri: &str| (domain.to_owned(), uri.to_owned());
        assert_eq!(parted("libvirt:web01"), pair("web01", ""));
        assert_eq!(parted("libvirt:"), pair("", ""));
        assert_eq!(parted("libvirt:@qemu:///system"), pair("", "qemu:///system"));
        assert_eq!(parted("libvirt:a@b"), pair("a@b", ""));
        let ssh = "qemu+ssh://root@host/system";
        assert_eq!(parted(&format!("libvirt:a@b@{ssh}")), pair("a@b", ssh));
        let socket = "qemu+unix:///system?socket=/run/a@b";
        assert_eq!(parted(&format!("libvirt:vm1@{socket}")), pair("vm1", socket));
        for text in ["libvirt:web01", "libvirt:vm1@qemu:///system"] {
            assert_eq!(text.parse::<VmName>().unwrap().to_string(), text);
        }
    }
}
