//! Who attends to each vhost-user device, so that it shows if somebody came and went between two
//! looks.
//!
//! A back end that connects, writes to guest memory and is gone before the next look leaves nothing
//! to be found: its page tables went with it. But it takes the device's only connection. So nobody
//! did if each device was attended to at both looks, by the same process over the same connection.
//! One that has mapped nothing yet (the guest has not begun to use the device) is not tracked; it
//! may have mapped memory, written, and let go of it. That takes page faults, which the kernel
//! counts.

use std::fs;

use super::front::Front;
use crate::clients::Connection;

/// A process that attends to a device, or to several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attendant {
    pub(super) pid: i32,
    /// In ticks since the host was started.
    pub(super) started: Option<u64>,
    pub(super) connections: Vec<Connection>,
    /// Its page faults so far; of one that maps guest memory, and is tracked, `None`.
    pub(super) faults: Option<u64>,
}

/// Those of `all` that are at each of `fronts`. `None`: one has nobody, so that anybody may come
/// and go.
pub(super) fn attendants(fronts: &[Front], all: &[Attendant]) -> Option<Vec<Vec<Attendant>>> {
    let at = |front: &Front| {
        let found: Vec<Attendant> = all.iter().filter_map(|one| one.at(front)).collect();
        (!found.is_empty()).then_some(found)
    };
    fronts.iter().map(at).collect()
}

impl Attendant {
    /// The same with the connections that are `front`'s, if there are any.
    fn at(&self, front: &Front) -> Option<Self> {
        let connections = self.connections.iter().filter(|it| match front.path {
            Some(_) => front.has(it),
            // Anyone who maps guest memory may be at this one, and nobody else.
            None => self.faults.is_none(),
        });
        let connections: Vec<Connection> = connections.cloned().collect();
        (!connections.is_empty()).then(|| Self { connections, ..self.clone() })
    }
}

/// How many page faults process `pid` has had, in all its threads.
pub(super) fn faults(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Of the fields after the name (proc_pid_stat(5)), the 8th and the 10th.
    let mut fields = stat.rsplit_once(") ")?.1.split_whitespace().skip(7);
    let minor: u64 = fields.next()?.parse().ok()?;
    let major: u64 = fields.nth(1)?.parse().ok()?;
    Some(minor.saturating_add(major))
}
