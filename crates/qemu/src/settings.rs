//! QEMU's migration capabilities and parameters, set for our purpose and put back afterwards.

use serde_json::{Map, Value, json};

use crate::QemuError;
use crate::qmp::{Qmp, QmpError};

/// What godwit needs: RAM in shared files left out, the guest stopped and the devices not yet saved, and an event at
/// each change of state.
const NEEDED: [&str; 3] = ["x-ignore-shared", "pause-before-switchover", "events"];
/// What is turned on where there is such. A destination that has loaded must not take the locks of its images before it
/// is told to run: the source may still need them (QEMU's `docs/interop`: migration capability late-block-activate).
const WANTED: [&str; 1] = ["late-block-activate"];
/// What would change the stream or its channel; a management program may have left them on.
const IN_THE_WAY: [&str; 12] = [
    "background-snapshot",
    "block",
    "compress",
    "mapped-ram",
    "multifd",
    "postcopy-preempt",
    "postcopy-ram",
    "release-ram",
    "return-path",
    "switchover-ack",
    "x-colo",
    "zero-copy-send",
];

/// As no limit of QEMU's own may stand between its last byte and the switchover: what it sends is small. And no TLS on a
/// pair of sockets.
fn parameters() -> Value {
    json!({ "max-bandwidth": 1u64 << 40, "downtime-limit": 10_000, "tls-creds": "" })
}

/// Capabilities and parameters as they were found, as far as they have to be changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Settings {
    capabilities: Vec<Value>,
    parameters: Value,
}

impl Settings {
    /// Looks what is not as it is needed. Changes nothing.
    pub(crate) fn look(qmp: &mut Qmp) -> Result<Self, QemuError> {
        let found = qmp.execute("query-migrate-capabilities", Value::Null)?;
        let state = |name: &str| {
            found.as_array()?.iter().find(|entry| entry["capability"] == name)?["state"].as_bool()
        };
        let mut capabilities = Vec::new();
        let mut want = |name: &'static str, on: bool, is: bool| {
            if is != on {
                capabilities.push(json!({ "capability": name, "state": is }));
            }
        };
        for name in NEEDED {
            want(name, true, state(name).ok_or(QemuError::NoCapability(name))?);
        }
        for name in WANTED {
            if let Some(is) = state(name) {
                want(name, true, is);
            }
        }
        for name in IN_THE_WAY {
            if let Some(is) = state(name) {
                want(name, false, is);
            }
        }
        let found = qmp.execute("query-migrate-parameters", Value::Null)?;
        let ours = parameters();
        let names = ours.as_object().into_iter().flat_map(|ours| ours.keys());
        let there = names.filter(|name| !found[*name].is_null());
        let parameters: Map<_, _> = there.map(|name| (name.clone(), found[name].clone())).collect();
        Ok(Self { capabilities, parameters: parameters.into() })
    }

    /// Turns on what is needed and off what is in the way.
    pub(crate) fn apply(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        set_capabilities(qmp, &opposite(&self.capabilities))?;
        let set = qmp.execute("migrate-set-parameters", parameters());
        if let Err(error) = set {
            self.restore(qmp)?;
            return Err(error);
        }
        Ok(())
    }

    /// Puts everything back.
    pub(crate) fn restore(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        set_capabilities(qmp, &self.capabilities)?;
        set_parameters(qmp, self.parameters.clone())
    }

    /// Puts back what still is as `apply` made it: somebody may have been here since.
    pub(crate) fn restore_ours(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        let found = qmp.execute("query-migrate-capabilities", Value::Null)?;
        let found = found.as_array().cloned().unwrap_or_default();
        let ours = opposite(&self.capabilities);
        let pairs = self.capabilities.iter().zip(&ours);
        let still = pairs.filter(|(_, ours)| found.contains(ours)).map(|(before, _)| before.clone());
        set_capabilities(qmp, &still.collect::<Vec<_>>())?;
        let (found, ours) = (qmp.execute("query-migrate-parameters", Value::Null)?, parameters());
        let mut before = self.parameters.clone();
        if let Some(before) = before.as_object_mut() {
            before.retain(|name, _| found[name] == ours[name]);
        }
        set_parameters(qmp, before)
    }

    /// For the record.
    pub(crate) fn to_json(&self) -> Value {
        json!({ "capabilities": self.capabilities, "parameters": self.parameters })
    }

    pub(crate) fn from_json(value: &Value) -> Option<Self> {
        let capabilities = value["capabilities"].as_array()?.clone();
        Some(Self { capabilities, parameters: value["parameters"].clone() })
    }
}

fn opposite(capabilities: &[Value]) -> Vec<Value> {
    let other = |entry: &Value| json!({ "capability": entry["capability"], "state": entry["state"] != true });
    capabilities.iter().map(other).collect()
}

fn set_capabilities(qmp: &mut Qmp, capabilities: &[Value]) -> Result<(), QmpError> {
    if capabilities.is_empty() {
        return Ok(());
    }
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).map(drop)
}

fn set_parameters(qmp: &mut Qmp, parameters: Value) -> Result<(), QmpError> {
    if parameters.as_object().is_none_or(Map::is_empty) {
        return Ok(());
    }
    qmp.execute("migrate-set-parameters", parameters).map(drop)
}
