//! The guest's disk writes limited by QEMU's own I/O throttling, and put back as they were.
//!
//! Source: `block_set_io_throttle` and `query-block` of QEMU's QMP reference. Limits that the
//! operator had set hold as well: of two limits the lower one. Unlike the throttle of vCPUs these
//! limits are QEMU's and would stay when godwit is killed, so they are recorded before they are set
//! (`guard`).

use godwit_units::Rate;
use serde_json::{Value, json};

use crate::monitor::commands::{Block, QueryBlock, SetIoThrottle};
use crate::monitor::{Monitor, QmpError};

/// The numbers that every call must name, and those that it may.
const RATES: [&str; 6] = ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"];
const FURTHER: [&str; 13] = [
    "bps_max",
    "bps_rd_max",
    "bps_wr_max",
    "iops_max",
    "iops_rd_max",
    "iops_wr_max",
    "bps_max_length",
    "bps_rd_max_length",
    "bps_wr_max_length",
    "iops_max_length",
    "iops_rd_max_length",
    "iops_wr_max_length",
    "iops_size",
];

/// What is set of one disk.
#[derive(Clone, Debug, PartialEq)]
struct Set {
    /// The block node that the guest's device uses.
    node: String,
    /// The call that sets it again.
    call: Value,
}

/// The disks that are limited.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DiskLimits {
    /// As they were before.
    before: Vec<Set>,
    /// The calls that limit them.
    ours: Vec<Value>,
}

impl DiskLimits {
    /// Looks which of these disks, known by the node that they use, there are, at the first call,
    /// and what limits their writes so. Changes nothing.
    pub(crate) fn plan(
        &mut self,
        qmp: &mut dyn Monitor,
        limits: &[(&str, Rate)],
    ) -> Result<(), QmpError> {
        if self.before.is_empty() {
            self.before = disks(&qmp.run(&QueryBlock)?);
            self.before.retain(|before| limits.iter().any(|(node, _)| *node == before.node));
        }
        self.ours = calls(&self.before, limits);
        Ok(())
    }

    /// Sets the limits as planned.
    pub(crate) fn apply(&self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        self.ours.iter().try_for_each(|call| set(qmp, call))
    }

    /// Puts all limits back. Every disk is tried; the first error is returned.
    pub(crate) fn restore(&mut self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        self.ours.clear();
        let before = std::mem::take(&mut self.before);
        before.iter().map(|before| set(qmp, &before.call)).fold(Ok(()), Result::and)
    }

    /// Puts back the limits that still are as `apply` made them: somebody may have been here since.
    pub(crate) fn restore_ours(&mut self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        let now = disks(&qmp.run(&QueryBlock)?);
        let disk = |a: &Value, b: &Value| a["id"] == b["id"] && a["device"] == b["device"];
        let limits = |a: &Value, b: &Value| RATES.iter().all(|key| a[*key] == b[*key]);
        let ours = std::mem::take(&mut self.ours);
        self.before.retain(|before| {
            let mut ours = ours.iter().filter(|ours| disk(ours, &before.call));
            ours.any(|ours| now.iter().any(|now| disk(&now.call, ours) && limits(&now.call, ours)))
        });
        self.restore(qmp)
    }

    /// Whether there is nothing to put back.
    pub(crate) fn is_empty(&self) -> bool {
        self.before.is_empty()
    }

    /// For the record.
    pub(crate) fn to_json(&self) -> Value {
        let set = |set: &Set| json!({ "node": set.node, "call": set.call });
        json!({ "before": self.before.iter().map(set).collect::<Vec<_>>(), "ours": self.ours })
    }

    pub(crate) fn from_json(value: &Value) -> Option<Self> {
        let node = |set: &Value| set["node"].as_str().unwrap_or_default().to_owned();
        let set = |set: &Value| Set { node: node(set), call: set["call"].clone() };
        let before = value["before"].as_array()?.iter().map(set).collect();
        Some(Self { before, ours: value["ours"].as_array()?.clone() })
    }
}

fn set(qmp: &mut dyn Monitor, call: &Value) -> Result<(), QmpError> {
    qmp.run(&SetIoThrottle(call)).map(drop)
}

/// The calls that put `limits` in force where it is as `before`.
fn calls(before: &[Set], limits: &[(&str, Rate)]) -> Vec<Value> {
    let own =
        |disk: &Set| limits.iter().find(|(node, _)| *node == disk.node).map(|(_, rate)| *rate);
    let group = |disk: &Set| disk.call["group"].as_str().map(str::to_owned);
    let limit = |disk: &Set| {
        // The limits of a group are one: it has what its disks have together. Two devices on one
        // node are one disk.
        let mut nodes: Vec<&str> = Vec::new();
        let same = |other: &&Set| group(disk).is_some() && group(other) == group(disk);
        for other in before.iter().filter(same) {
            if !nodes.contains(&other.node.as_str()) {
                nodes.push(&other.node);
            }
        }
        let of_group = limits.iter().filter(|(node, _)| nodes.contains(node));
        let all: f64 = of_group.map(|(_, rate)| rate.bytes_per_second()).sum();
        if nodes.is_empty() { own(disk) } else { Some(Rate::from_bytes_per_second(all)) }
    };
    before.iter().filter_map(|disk| Some(limited(&disk.call, limit(disk)?))).collect()
}

/// The call for each disk that would set what is set.
fn disks(blocks: &[Block]) -> Vec<Set> {
    let disk = |block: &Block| {
        let inserted = block.inserted.as_ref().filter(|inserted| !inserted.ro)?;
        let number = |key: &str| inserted.limits.get(key).and_then(Value::as_u64);
        let mut call = match (block.qdev.as_str(), block.device.as_str()) {
            ("", "") => return None,
            ("", device) => json!({ "device": device }),
            (qdev, _) => json!({ "id": qdev }),
        };
        for key in RATES {
            call[key] = json!(number(key).unwrap_or(0));
        }
        for key in FURTHER {
            if let Some(number) = number(key).filter(|number| *number > 0) {
                call[key] = json!(number);
            }
        }
        if let Some(group) = inserted.limits.get("group").filter(|group| group.is_string()) {
            call["group"] = group.clone();
        }
        Some(Set { node: inserted.node_name.clone(), call })
    };
    blocks.iter().filter_map(disk).collect()
}

/// `call` with writes limited to `rate`. A limit of reads and writes together excludes one of
/// writes, so it is lowered.
fn limited(call: &Value, rate: Rate) -> Value {
    let bytes = (rate.bytes_per_second() as u64).max(1);
    let mut call = call.clone();
    let key = if call["bps"].as_u64() > Some(0) { "bps" } else { "bps_wr" };
    let there = call[key].as_u64().filter(|number| *number > 0);
    call[key] = json!(there.map_or(bytes, |there| there.min(bytes)));
    if let (Some(object), true) = (call.as_object_mut(), there.is_none_or(|there| there > bytes)) {
        // A burst above the new limit is refused, or would go around it.
        object.remove(&format!("{key}_max"));
        object.remove(&format!("{key}_max_length"));
    }
    call
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(text: &str) -> Rate {
        text.parse().unwrap()
    }

    /// A drive with a medium that has these limits.
    fn block(qdev: &str, limits: Value) -> Block {
        let mut inserted = json!({ "file": "", "ro": false, "cache": { "direct": false },
            "image": { "filename": "", "format": "raw", "virtual-size": 512 } });
        inserted.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
        let block = json!({ "qdev": qdev, "device": "", "inserted": inserted });
        serde_json::from_value(block).unwrap()
    }

    #[test]
    fn the_lower_of_two_limits_holds() {
        let limits = |bps: u64, bps_wr: u64| {
            let limits =
                json!({ "bps": bps, "bps_rd": 0, "bps_wr": bps_wr, "bps_wr_max": bps_wr * 2 });
            block("/machine/peripheral/disk", limits)
        };
        let call = |bps, bps_wr| limited(&disks(&[limits(bps, bps_wr)])[0].call, rate("1MiB/s"));
        assert_eq!(call(0, 0)["bps_wr"], 1 << 20);
        assert_eq!(call(0, 5 << 20)["bps_wr"], 1 << 20);
        assert_eq!(call(0, 5 << 20)["bps_wr_max"], Value::Null);
        assert_eq!(call(0, 1000)["bps_wr"], 1000);
        assert_eq!(call(0, 1000)["bps_wr_max"], 2000);
        assert_eq!(
            (&call(5 << 20, 0)["bps"], &call(5 << 20, 0)["bps_wr"]),
            (&json!(1 << 20), &json!(0))
        );
        assert_eq!(call(0, 0)["id"], "/machine/peripheral/disk");
    }

    /// Drives with these nodes and groups.
    fn drives(drives: &[(&str, Option<&str>)]) -> Vec<Set> {
        let drive = |(node, group): &(&str, Option<&str>)| {
            let mut more = json!({ "node-name": node });
            if let Some(group) = group {
                more["group"] = json!(group);
            }
            block(&format!("dev-{node}"), more)
        };
        disks(&drives.iter().map(drive).collect::<Vec<_>>())
    }

    #[test]
    fn each_disk_has_its_own_limit_and_a_group_what_its_disks_have_together() {
        let before = drives(&[("a", None), ("b", Some("g")), ("c", Some("g")), ("other", None)]);
        let limits = [("a", rate("1MiB/s")), ("b", rate("2MiB/s")), ("c", rate("4MiB/s"))];
        let calls = calls(&before, &limits);
        let set: Vec<_> =
            calls.iter().map(|call| (call["id"].as_str(), call["bps_wr"].as_u64())).collect();
        assert_eq!(
            set,
            [
                (Some("dev-a"), Some(1 << 20)),
                (Some("dev-b"), Some(6 << 20)),
                (Some("dev-c"), Some(6 << 20))
            ]
        );
    }

    #[test]
    fn what_holds_no_disk_or_cannot_be_written_is_left_alone() {
        let empty = Block { inserted: None, ..block("cd", json!({})) };
        assert!(disks(&[empty, block("rom", json!({ "ro": true }))]).is_empty());
    }
}
