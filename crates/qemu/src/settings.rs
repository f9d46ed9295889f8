//! QEMU's migration capabilities and parameters, set for our purpose and put back afterwards.

use serde_json::{Value, json};

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

/// Capabilities and parameters as they were found.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    capabilities: Vec<Value>,
    parameters: Value,
}

impl Settings {
    /// Turns on what is needed and off what is in the way, and remembers what it changed.
    pub(crate) fn apply(qmp: &mut Qmp) -> Result<Self, QemuError> {
        let found = qmp.execute("query-migrate-capabilities", Value::Null)?;
        let state = |name: &str| {
            found.as_array()?.iter().find(|entry| entry["capability"] == name)?["state"].as_bool()
        };
        let mut wanted = Vec::new();
        let mut before = Vec::new();
        let mut want = |name: &'static str, on: bool, is: bool| {
            if is != on {
                wanted.push(json!({ "capability": name, "state": on }));
                before.push(json!({ "capability": name, "state": is }));
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
        // No limit of QEMU's own may stand between its last byte and the switchover: what it sends is small. And no TLS
        // on a pair of sockets.
        let found = qmp.execute("query-migrate-parameters", Value::Null)?;
        let ours = json!({ "max-bandwidth": 1u64 << 40, "downtime-limit": 10_000, "tls-creds": "" });
        let mut parameters = serde_json::Map::new();
        for name in ["max-bandwidth", "downtime-limit", "tls-creds"] {
            if !found[name].is_null() {
                parameters.insert(name.to_owned(), found[name].clone());
            }
        }
        let settings = Self { capabilities: before, parameters: parameters.into() };
        if !wanted.is_empty() {
            qmp.execute("migrate-set-capabilities", json!({ "capabilities": wanted }))?;
        }
        if let Err(error) = qmp.execute("migrate-set-parameters", ours) {
            settings.restore(qmp)?;
            return Err(error.into());
        }
        Ok(settings)
    }

    /// Puts everything back.
    pub(crate) fn restore(self, qmp: &mut Qmp) -> Result<(), QmpError> {
        if !self.capabilities.is_empty() {
            qmp.execute("migrate-set-capabilities", json!({ "capabilities": self.capabilities }))?;
        }
        if self.parameters.is_object() {
            qmp.execute("migrate-set-parameters", self.parameters)?;
        }
        Ok(())
    }
}
