//! Why a process may not be traced or may not make a userfaultfd, as far as this host tells: who it
//! belongs to, Yama, AppArmor, SELinux, system-call filters. All of it is looked at after the
//! kernel has refused, which does not say why (ptrace(2), "Ptrace access mode checking").

use std::fs;
use std::io;

use crate::TrackError;

/// What the kernel looks at before it lets one process trace another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Facts {
    /// Whose the process is, and whose this one is.
    user: u32,
    own_user: u32,
    /// Whether this process has CAP_SYS_PTRACE.
    may_trace: bool,
    /// `kernel.yama.ptrace_scope`, where there is Yama.
    yama: Option<u32>,
    /// Whether the process has changed its user, or has capabilities of its own: then its files in
    /// /proc are root's (proc(5)).
    is_roots: bool,
    /// What AppArmor or SELinux call the two.
    label: Option<String>,
    own_label: Option<String>,
}

/// Who confines a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Confined<'a> {
    /// By this profile.
    AppArmor(&'a str),
    /// In this context.
    SeLinux(&'a str),
}

/// That process `pid` may not be traced, with the likely cause and its cure.
pub(crate) fn not_permitted(pid: i32) -> TrackError {
    TrackError::NotPermitted { pid, cause: Facts::of(pid).cause() }
}

/// Whether this process may trace process `pid`, as far as that can be told without an attempt.
///
/// # Errors
/// [`TrackError::NotPermitted`], with the likely cause and its cure.
///
/// ```
/// let own = std::process::id().cast_signed();
/// if let Err(refused) = godwit_track::may_trace(own) {
///     println!("{refused}");
/// }
/// ```
pub fn may_trace(pid: i32) -> Result<(), TrackError> {
    let facts = Facts::of(pid);
    if facts.is_refused() { Err(not_permitted(pid)) } else { Ok(()) }
}

/// That process `pid` may not make a userfaultfd, with the likely cause and its cure.
pub(crate) fn refused(pid: i32, source: io::Error) -> TrackError {
    let status = read(&format!("/proc/{pid}/status"));
    let filters = field(&status, "Seccomp:").is_some_and(|mode| mode == "2");
    let cause = of_refusal(label(&pid.to_string()).as_deref(), filters, source.kind());
    TrackError::Refused { pid, source, cause }
}

impl Facts {
    fn of(pid: i32) -> Self {
        use std::os::unix::fs::MetadataExt;
        let status = read(&format!("/proc/{pid}/status"));
        let own = read("/proc/self/status");
        let user = |status: &str| {
            field(status, "Uid:").and_then(|ids| ids.split_whitespace().nth(1)?.parse().ok())
        };
        let capabilities =
            field(&own, "CapEff:").and_then(|bits| u64::from_str_radix(bits, 16).ok());
        let owner = fs::metadata(format!("/proc/{pid}")).map(|data| data.uid()).ok();
        let user_of_it = user(&status).unwrap_or_default();
        let yama = read("/proc/sys/kernel/yama/ptrace_scope");
        Self {
            user: user_of_it,
            own_user: user(&own).unwrap_or_default(),
            // CAP_SYS_PTRACE is 19 (linux/capability.h).
            may_trace: capabilities.is_some_and(|bits| bits >> 19 & 1 == 1),
            yama: yama.trim().parse().ok(),
            is_roots: owner.is_some_and(|owner| owner == 0 && user_of_it != 0),
            label: label(&pid.to_string()),
            own_label: label("self"),
        }
    }

    /// Whether the kernel would refuse for a reason that shows.
    fn is_refused(&self) -> bool {
        let Self { user, own_user, may_trace, yama, is_roots, .. } = *self;
        yama == Some(3) || !may_trace && (own_user != user || is_roots || yama.unwrap_or(0) > 0)
    }

    /// The likely cause, the surest first, and its cure.
    fn cause(&self) -> String {
        let Self { user, own_user, may_trace, .. } = *self;
        let root = "run godwit as root";
        match (self.yama, self.own_label.as_deref().and_then(confined)) {
            (Some(3), _) => {
                "kernel.yama.ptrace_scope is 3, so that nobody may attach to a process \
                             until this host is booted with another value"
                    .to_owned()
            }
            _ if !may_trace && own_user == 0 => {
                "godwit is root without CAP_SYS_PTRACE, as in a container: give it that capability"
                    .to_owned()
            }
            _ if !may_trace && own_user != user => format!(
                "it belongs to user {user}, and godwit runs as user {own_user}: {root} or as the \
                 user that runs QEMU{}",
                match self.yama {
                    Some(scope @ 1..) =>
                        format!(", with CAP_SYS_PTRACE, since kernel.yama.ptrace_scope is {scope}"),
                    _ => String::new(),
                }
            ),
            (Some(scope @ 1..), _) if !may_trace => format!(
                "kernel.yama.ptrace_scope is {scope}: {root}, give it CAP_SYS_PTRACE{}",
                if scope == 1 { ", or set that to 0" } else { "" }
            ),
            _ if !may_trace && self.is_roots => format!(
                "it has changed its user or has capabilities of its own, so that only root may \
                 look into it: {root}"
            ),
            (_, Some(Confined::AppArmor(own))) => format!(
                "AppArmor confines godwit by the profile {own}, the likely cause: let that profile \
                 trace ('ptrace,'), or run godwit unconfined"
            ),
            _ => match self.label.as_deref().and_then(confined) {
                Some(Confined::AppArmor(profile)) => format!(
                    "AppArmor confines it by the profile {profile}, the likely cause: let that \
                     profile be traced ('ptrace (readby, tracedby),')"
                ),
                Some(Confined::SeLinux(context)) => format!(
                    "SELinux has it in the context {context}, the likely cause: setsebool \
                     deny_ptrace off, and run godwit unconfined (ausearch -m avc shows the refusal)"
                ),
                None => format!(
                    "the kernel does not say why: {root} of this host itself, outside of any \
                     container or user namespace"
                ),
            },
        }
    }
}

/// Why userfaultfd(2) was refused in a process of that `label`, and the cure.
fn of_refusal(label: Option<&str>, filters: bool, kind: io::ErrorKind) -> String {
    let device = "or run godwit where it may open /dev/userfaultfd";
    match label.and_then(confined) {
        // AppArmor has no rule for it.
        Some(Confined::SeLinux(context)) if kind == io::ErrorKind::PermissionDenied => format!(
            "SELinux, which has it in the context {context}, is the likely cause: let that use \
             anon_inode (ausearch -m avc shows the refusal), {device}"
        ),
        _ if filters => format!(
            "its seccomp filter is the likely cause: let that allow userfaultfd(2), {device}"
        ),
        _ => format!(
            "let what confines it (seccomp, SELinux, a container) allow userfaultfd(2), {device}"
        ),
    }
}

/// Reads a label (apparmor(7): `profile (mode)`; SELinux: `user:role:type:level`).
fn confined(label: &str) -> Option<Confined<'_>> {
    if let Some((profile, mode)) = label.rsplit_once(" (") {
        return (mode == "enforce)").then_some(Confined::AppArmor(profile));
    }
    let context = label.split(':').count() >= 3 && !label.contains("unconfined");
    context.then_some(Confined::SeLinux(label))
}

fn label(pid: &str) -> Option<String> {
    let text = read(&format!("/proc/{pid}/attr/current"));
    let text = text.trim_matches(|c: char| c == '\0' || c.is_whitespace());
    let clean = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    (!text.is_empty()).then(|| text.chars().map(clean).collect())
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(facts: &Facts, words: &[&str]) {
        let cause = facts.cause();
        for word in words {
            assert!(cause.contains(word), "'{word}' is not in: {cause}");
        }
        assert!(!cause.contains('\n') && cause.len() < 260, "{cause}");
    }

    #[test]
    fn another_user_is_told_whose_the_process_is() {
        let facts = Facts { user: 64055, own_user: 1000, ..Facts::default() };
        told(&facts, &["user 64055", "user 1000", "as root or as the user that runs QEMU"]);
        told(&Facts { yama: Some(1), ..facts }, &["CAP_SYS_PTRACE", "ptrace_scope is 1"]);
        let container = Facts { user: 64055, ..Facts::default() };
        told(&container, &["root without CAP_SYS_PTRACE", "container"]);
    }

    #[test]
    fn yama_is_named_with_its_value() {
        let same = Facts { user: 1000, own_user: 1000, ..Facts::default() };
        let scope = |scope, may_trace| Facts { yama: Some(scope), may_trace, ..same.clone() };
        told(&scope(1, false), &["kernel.yama.ptrace_scope is 1", "or set that to 0"]);
        told(&scope(2, false), &["kernel.yama.ptrace_scope is 2: run godwit as root"]);
        told(&scope(3, true), &["is 3", "nobody may attach", "booted"]);
        told(&Facts { is_roots: true, ..scope(0, false) }, &["only root may look into it"]);
    }

    #[test]
    fn who_confines_a_process_is_named() {
        let labels = |own: &str, theirs: &str| Facts {
            user: 64055,
            may_trace: true,
            yama: Some(1),
            own_label: Some(own.to_owned()),
            label: Some(theirs.to_owned()),
            ..Facts::default()
        };
        let vm = "libvirt-1c0a (enforce)";
        told(&labels("unconfined", vm), &["AppArmor", "profile libvirt-1c0a,", "tracedby"]);
        told(&labels("/usr/bin/godwit (enforce)", vm), &["godwit by the profile /usr/bin/godwit,"]);
        let context = "system_u:system_r:svirt_t:s0:c1,c2";
        let own = "unconfined_u:unconfined_r:unconfined_t:s0";
        told(&labels(own, context), &["SELinux", context, "deny_ptrace off"]);
        told(&labels("unconfined", "vm (complain)"), &["the kernel does not say why"]);
        told(&labels("unconfined", "unconfined"), &["the kernel does not say why"]);
    }

    #[test]
    fn who_refuses_a_userfaultfd_is_named() {
        let cause = |label, filters, kind| of_refusal(label, filters, kind);
        let denied = io::ErrorKind::PermissionDenied;
        let context = Some("system_u:system_r:svirt_t:s0");
        assert!(cause(context, true, denied).contains("SELinux, which has it in the context"));
        assert!(cause(Some("libvirt-1 (enforce)"), true, denied).contains("seccomp filter is"));
        assert!(cause(None, false, denied).contains("what confines it"));
    }

    #[test]
    fn facts_of_this_process_are_found() {
        let facts = Facts::of(std::process::id().cast_signed());
        assert_eq!((facts.user, facts.label.clone()), (facts.own_user, facts.own_label.clone()));
        assert!(!facts.is_roots);
    }
}
