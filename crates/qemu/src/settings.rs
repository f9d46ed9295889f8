//! QEMU's migration capabilities and parameters, set for our purpose and put back afterwards.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::QemuError;
use crate::monitor::commands::{
    Capability, QueryCapabilities, QueryParameters, SetCapabilities, SetParameters,
};
use crate::monitor::{Monitor, QmpError};

/// What godwit needs: RAM in shared files left out, the guest stopped and the devices not yet
/// saved, and an event at each change of state.
const NEEDED: [&str; 3] = ["x-ignore-shared", "pause-before-switchover", "events"];
/// What is turned on where there is such. A destination that has loaded must not take the locks of
/// its images before it is told to run: the source may still need them (QEMU's `docs/interop`:
/// migration capability late-block-activate).
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

/// As no limit of QEMU's own may stand between its last byte and the switchover: what it sends is
/// small. And no TLS on a pair of sockets.
fn parameters() -> Map<String, Value> {
    let ours = [
        ("max-bandwidth", json!(1u64 << 40)),
        ("downtime-limit", json!(10_000)),
        ("tls-creds", json!("")),
    ];
    ours.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// How often QEMU tells the network of a guest that it has loaded.
const ROUNDS: &str = "announce-rounds";

/// Capabilities and parameters as they were found, as far as they have to be changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct MigrationSettings {
    capabilities: Vec<Capability>,
    parameters: Map<String, Value>,
    /// What [`ROUNDS`] is to be, where it is not to stay as it is.
    announce: Option<u16>,
}

impl MigrationSettings {
    /// Looks what is not as it is needed, where the network is to be told of the guest so often;
    /// `None`: as QEMU has it. Changes nothing.
    pub(crate) fn look(qmp: &mut dyn Monitor, announce: Option<u16>) -> Result<Self, QemuError> {
        let found = qmp.run(&QueryCapabilities)?;
        let state = |name: &str| Some(found.iter().find(|entry| entry.capability == name)?.state);
        let mut capabilities = Vec::new();
        let mut want = |name: &'static str, on: bool, is: bool| {
            if is != on {
                capabilities.push(Capability { capability: name.to_owned(), state: is });
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
        let mut settings = Self { capabilities, announce, ..Self::default() };
        let ours = settings.ours();
        let mut parameters = qmp.run(&QueryParameters)?;
        parameters.retain(|name, value| ours.contains_key(name) && !value.is_null());
        settings.parameters = parameters;
        Ok(settings)
    }

    /// The parameters that it needs.
    fn ours(&self) -> Map<String, Value> {
        let mut ours = parameters();
        if let Some(rounds) = self.announce {
            ours.insert(ROUNDS.to_owned(), json!(rounds));
        }
        ours
    }

    /// Turns on what is needed and off what is in the way.
    pub(crate) fn apply(&self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        set_capabilities(qmp, &opposite(&self.capabilities))?;
        if let Err(error) = set_parameters(qmp, &self.ours()) {
            self.restore(qmp)?;
            return Err(error);
        }
        Ok(())
    }

    /// Puts everything back.
    pub(crate) fn restore(&self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        set_capabilities(qmp, &self.capabilities)?;
        set_parameters(qmp, &self.parameters)
    }

    /// Puts back what still is as `apply` made it: somebody may have been here since.
    pub(crate) fn restore_ours(&self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        let found = qmp.run(&QueryCapabilities)?;
        let ours = opposite(&self.capabilities);
        let pairs = self.capabilities.iter().zip(&ours);
        let still =
            pairs.filter(|(_, ours)| found.contains(ours)).map(|(before, _)| before.clone());
        set_capabilities(qmp, &still.collect::<Vec<_>>())?;
        let (found, ours) = (qmp.run(&QueryParameters)?, self.ours());
        let mut before = self.parameters.clone();
        before.retain(|name, _| found.get(name) == ours.get(name));
        set_parameters(qmp, &before)
    }

    /// For the record.
    pub(crate) fn to_json(&self) -> Value {
        let Self { capabilities, parameters, announce } = self;
        json!({ "capabilities": capabilities, "parameters": parameters, "announce": announce })
    }

    pub(crate) fn from_json(value: &Value) -> Option<Self> {
        let capabilities = Vec::deserialize(value.get("capabilities")?).ok()?;
        let parameters = value.get("parameters")?.as_object()?.clone();
        // One of a release before this has none.
        let announce = value["announce"].as_u64().and_then(|rounds| rounds.try_into().ok());
        Some(Self { capabilities, parameters, announce })
    }
}

fn opposite(capabilities: &[Capability]) -> Vec<Capability> {
    let other = |entry: &Capability| Capability { state: !entry.state, ..entry.clone() };
    capabilities.iter().map(other).collect()
}

fn set_capabilities(qmp: &mut dyn Monitor, capabilities: &[Capability]) -> Result<(), QmpError> {
    if capabilities.is_empty() {
        return Ok(());
    }
    qmp.run(&SetCapabilities { capabilities }).map(drop)
}

fn set_parameters(qmp: &mut dyn Monitor, parameters: &Map<String, Value>) -> Result<(), QmpError> {
    if parameters.is_empty() {
        return Ok(());
    }
    qmp.run(&SetParameters(parameters)).map(drop)
}
