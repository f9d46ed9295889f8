//! Whether the back ends have done all that they had taken on, once the guest was stopped.
//!
//! QEMU asks each back end where its queues are and has it stop them (`VHOST_USER_GET_VRING_BASE`);
//! requests that it is at work on then should be done. Not every back end waits for them
//! (qemu-storage-daemon does not): it answers, and puts results into guest memory later. So each
//! queue is waited for until what was taken from it has been given back: the guest finds nothing
//! unanswered at the destination, and no data lands here that nobody looks at any more.

use std::time::{Duration, Instant};

use super::Front;
use crate::QemuError;
use crate::machine::Machine;
use crate::monitor::QmpError;
use crate::monitor::commands::{
    Human, NO_QUEUE, NOT_STARTED, QomGet, VhostQueueStatus, VirtioQueue, VirtioQueueStatus,
};

const PAUSE: Duration = Duration::from_millis(1);

/// The queues of all vhost-user devices, asked for while the guest runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queues(Vec<Device>);

#[derive(Clone, Debug)]
struct Device {
    name: String,
    path: String,
    /// Its queues may have the other layout (VIRTIO_F_RING_PACKED), which has no one place that
    /// tells how far the back end is.
    packed: bool,
}

impl Queues {
    /// Those of `fronts`.
    pub(crate) fn of(machine: &mut Machine, fronts: &[Front]) -> Result<Self, QmpError> {
        let mut devices = Vec::new();
        for front in fronts {
            let Some(path) = front.virtio.clone() else { continue };
            let packed = machine.qmp.run(&QomGet::<bool>::new(&path, "packed"))?;
            devices.push(Device { name: front.to_string(), path, packed });
        }
        Ok(Self(devices))
    }

    /// Waits up to `limit` until nothing is under way. The guest must have been stopped. `gone`
    /// says whether a back end has gone, which gives nothing back any more.
    pub(crate) fn await_idle(
        &self,
        machine: &mut Machine,
        limit: Duration,
        gone: &dyn Fn() -> bool,
    ) -> Result<(), QemuError> {
        let until = Instant::now() + limit;
        for device in &self.0 {
            // To ask for the queues of a back end that is at work would stop them.
            if device.is_at_work(machine)? {
                let what = device.name.clone();
                return Err(QemuError::BackEndBusy { what, requests: None, limit });
            }
            for queue in 0.. {
                let Some(told) = device.queue(machine, queue)? else { break };
                device.await_queue(machine, &told, (limit, until), gone)?;
            }
        }
        Ok(())
    }
}

impl Device {
    /// Whether the back end is at work on its queues.
    fn is_at_work(&self, machine: &mut Machine) -> Result<bool, QmpError> {
        match machine.qmp.run(&VhostQueueStatus { path: &self.path, queue: 0 }) {
            Ok(_) => Ok(true),
            Err(QmpError::Refused { description, .. }) if description.contains(NOT_STARTED) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// What QEMU knows of one of its queues, of which there is always one; `None` behind the last.
    fn queue(&self, machine: &mut Machine, queue: u16) -> Result<Option<VirtioQueue>, QmpError> {
        match machine.qmp.run(&VirtioQueueStatus { path: &self.path, queue }) {
            Ok(told) => Ok(Some(told)),
            Err(QmpError::Refused { description, .. })
                if queue > 0 && description.contains(NO_QUEUE) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn await_queue(
        &self,
        machine: &mut Machine,
        told: &VirtioQueue,
        (limit, until): (Duration, Instant),
        gone: &dyn Fn() -> bool,
    ) -> Result<(), QemuError> {
        // The guest has not set it up.
        if told.vring_num == 0 || told.vring_desc == 0 {
            return Ok(());
        }
        loop {
            let used = match self.packed {
                true => told.used_idx,
                false => given_back(machine, told)?,
            };
            let requests = told.last_avail_idx.wrapping_sub(used);
            if requests == 0 {
                return Ok(());
            }
            if self.packed || Instant::now() >= until {
                let what = self.name.clone();
                return Err(QemuError::BackEndBusy { what, requests: Some(requests), limit });
            }
            // What it has given back before it went is there by now.
            if gone() && given_back(machine, told)?.wrapping_add(requests) == told.last_avail_idx {
                let what = self.name.clone();
                return Err(QemuError::BackEndGone { what, requests });
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// How many requests the back end has given back, as it is in guest memory (virtio 1.2, 2.7.8).
fn given_back(machine: &mut Machine, queue: &VirtioQueue) -> Result<u16, QemuError> {
    let command = format!("xp /1hx {:#x}", queue.vring_used.saturating_add(2));
    let text = machine.qmp.run(&Human { command_line: &command })?;
    parse_used(&text).ok_or_else(|| {
        let description = format!("{command} answered '{}'", text.trim());
        QmpError::Refused { command: "xp".to_owned(), class: String::new(), description }.into()
    })
}

/// Reads `0000000002946942: 0x0001`.
fn parse_used(text: &str) -> Option<u16> {
    let (_, value) = text.trim().rsplit_once(": ")?;
    u16::from_str_radix(value.trim().strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::monitor::stand_in::{REFUSED, StandIn};

    /// A device that has taken `taken` requests and given `given` of them back.
    fn wait(taken: u16, given: &str, started: bool) -> Result<(), String> {
        wait_for(taken, given, started, false)
    }

    fn wait_for(taken: u16, given: &str, started: bool, gone: bool) -> Result<(), String> {
        wait_behind(taken, given, (started, gone), "Invalid virtqueue number 2")
    }

    /// The same where QEMU refuses a third queue with these words.
    fn wait_behind(
        taken: u16,
        given: &str,
        (started, gone): (bool, bool),
        third: &str,
    ) -> Result<(), String> {
        let queue = |taken| {
            json!({ "vring-num": 128, "vring-desc": 4096, "vring-used": 8192,
                "last-avail-idx": taken, "used-idx": 0 })
        };
        let used = |given: &str| json!(format!("0000000000002002: {given}\r\n"));
        let refused = |what: &str| json!({ REFUSED: what });
        let at_work =
            if started { json!({}) } else { refused("Error: vhost device has not started yet") };
        // Two queues, of which the second one is the one that is waited for.
        let idle = vec![queue(0), queue(taken), refused(third)];
        let stand_in = StandIn::new(&[("xp /1hx 0x2002", used(given))])
            .in_turn("x-query-virtio-vhost-queue-status", vec![at_work])
            .in_turn("x-query-virtio-queue-status", idle)
            .in_turn("human-monitor-command", vec![used("0x0000")]);
        let mut machine = Machine::behind(Box::new(stand_in)).unwrap();
        let name = "vhost-user-blk 'vb0'".to_owned();
        let queues = Queues(vec![Device { name, path: "/dev".to_owned(), packed: false }]);
        let waited = queues.await_idle(&mut machine, Duration::from_millis(20), &|| gone);
        waited.map_err(|error| error.to_string())
    }

    #[test]
    fn a_back_end_that_has_not_finished_is_waited_for_and_then_refused() {
        // Mutation: the queues are not looked at.
        assert_eq!(wait(5, "0x0005", false), Ok(()));
        assert_eq!(wait(0, "0x0000", false), Ok(()));
        let told = wait(3, "0xfffe", false).unwrap_err();
        assert!(told.contains("vhost-user-blk 'vb0'") && told.contains("5 requests"), "{told}");
        assert!(wait(5, "0x0005", true).unwrap_err().contains("did not stop"));
        let told = wait_for(3, "0x0001", false, true).unwrap_err();
        assert!(told.contains("2 requests") && told.contains("reconnect"), "{told}");
        assert!(wait(5, "Cannot access memory", false).is_err());
        // Mutation: whatever QEMU refuses for, there is no further queue.
        let lost = wait_behind(5, "0x0005", (false, false), "Path /dev is not a VirtIODevice");
        assert!(lost.unwrap_err().contains("is not a VirtIODevice"));
    }
}
