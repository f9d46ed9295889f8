//! The guest's disk writes limited by QEMU's own I/O throttling, and put back as they were.
//!
//! Source: `block_set_io_throttle` and `query-block` of QEMU's QMP reference. Limits that the operator had set hold as well: of two
//! limits the lower one. Unlike the throttle of vCPUs these limits are QEMU's and would stay when godwit is killed, so
//! they are recorded before they are set (`guard`).

use godwit_units::Rate;
use serde_json::{Value, json};

use crate::machine::text;
use crate::qmp::{Qmp, QmpError};

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

/// The disks that are limited.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DiskLimits {
    /// For each the call that sets what was set before,
    before: Vec<Value>,
    /// and the call that sets what is to be.
    ours: Vec<Value>,
}

impl DiskLimits {
    /// Looks which disks there are, at the first call, and what limits their writes to `rate` each. Changes nothing.
    pub(crate) fn plan(&mut self, qmp: &mut Qmp, rate: Rate) -> Result<(), QmpError> {
        if self.before.is_empty() {
            self.before = disks(&qmp.execute("query-block", Value::Null)?);
        }
        self.ours = self.before.iter().map(|before| limited(before, rate)).collect();
        Ok(())
    }

    /// Sets the limits as planned.
    pub(crate) fn apply(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.ours.iter().try_for_each(|call| set(qmp, call))
    }

    /// Puts all limits back. Every disk is tried; the first error is returned.
    pub(crate) fn restore(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.ours.clear();
        let before = std::mem::take(&mut self.before);
        before.iter().map(|call| set(qmp, call)).fold(Ok(()), Result::and)
    }

    /// Puts back the limits that still are as `apply` made them: somebody may have been here since.
    pub(crate) fn restore_ours(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        let now = disks(&qmp.execute("query-block", Value::Null)?);
        let same = |a: &Value, b: &Value| ["id", "device"].iter().chain(&RATES).all(|key| a[*key] == b[*key]);
        let mut ours = std::mem::take(&mut self.ours).into_iter();
        self.before.retain(|_| ours.next().is_some_and(|ours| now.iter().any(|now| same(now, &ours))));
        self.restore(qmp)
    }

    /// Whether there is nothing to put back.
    pub(crate) fn is_empty(&self) -> bool {
        self.before.is_empty()
    }

    /// For the record.
    pub(crate) fn to_json(&self) -> Value {
        json!({ "before": self.before, "ours": self.ours })
    }

    pub(crate) fn from_json(value: &Value) -> Option<Self> {
        let calls = |key: &str| value[key].as_array().cloned();
        Some(Self { before: calls("before")?, ours: calls("ours")? })
    }
}

fn set(qmp: &mut Qmp, call: &Value) -> Result<(), QmpError> {
    qmp.execute("block_set_io_throttle", call.clone()).map(drop)
}

/// The call for each disk that would set what is set.
fn disks(blocks: &Value) -> Vec<Value> {
    let blocks = blocks.as_array().into_iter().flatten();
    let disk = |block: &Value| {
        let inserted = block.get("inserted").filter(|inserted| inserted["ro"] != true)?;
        let (qdev, device) = (text(&block["qdev"]), text(&block["device"]));
        let mut call = match (qdev.as_str(), device.as_str()) {
            ("", "") => return None,
            ("", device) => json!({ "device": device }),
            (qdev, _) => json!({ "id": qdev }),
        };
        for key in RATES {
            call[key] = json!(inserted[key].as_u64().unwrap_or(0));
        }
        for key in FURTHER {
            if let Some(number) = inserted[key].as_u64().filter(|number| *number > 0) {
                call[key] = json!(number);
            }
        }
        if inserted["group"].is_string() {
            call["group"] = inserted["group"].clone();
        }
        Some(call)
    };
    blocks.filter_map(disk).collect()
}

/// `call` with writes limited to `rate`. A limit of reads and writes together excludes one of writes, so it is lowered.
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

    #[test]
    fn the_lower_of_two_limits_holds() {
        let block = |bps: u64, bps_wr: u64| {
            json!([{ "qdev": "/machine/peripheral/disk", "device": "", "inserted":
                { "ro": false, "bps": bps, "bps_rd": 0, "bps_wr": bps_wr, "bps_wr_max": bps_wr * 2 } }])
        };
        let call = |bps, bps_wr| limited(&disks(&block(bps, bps_wr))[0], rate("1MiB/s"));
        assert_eq!(call(0, 0)["bps_wr"], 1 << 20);
        assert_eq!(call(0, 5 << 20)["bps_wr"], 1 << 20);
        assert_eq!(call(0, 5 << 20)["bps_wr_max"], Value::Null);
        assert_eq!(call(0, 1000)["bps_wr"], 1000);
        assert_eq!(call(0, 1000)["bps_wr_max"], 2000);
        assert_eq!((&call(5 << 20, 0)["bps"], &call(5 << 20, 0)["bps_wr"]), (&json!(1 << 20), &json!(0)));
        assert_eq!(call(0, 0)["id"], "/machine/peripheral/disk");
    }

    #[test]
    fn what_holds_no_disk_or_cannot_be_written_is_left_alone() {
        let blocks = json!([{ "qdev": "cd", "device": "" }, { "device": "rom", "inserted": { "ro": true } }]);
        assert!(disks(&blocks).is_empty());
    }
}
