//! What a QEMU calls its guest, and the MAC addresses of its cards: for an operator's commands,
//! which tell a network about it.
//!
//! Both are asked of QEMU itself, so it is the same whoever manages the VM: managers give the name
//! by `-name`.

use crate::QemuError;
use crate::cards::mac_in;
use crate::monitor::commands::{Human, QueryName};
use crate::monitor::{Monitor, QmpError};

use super::QemuSource;

/// Who a guest is, to people and to a network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Empty when it has none.
    pub name: String,
    /// Of its cards, in QEMU's order.
    pub macs: Vec<String>,
}

impl Identity {
    fn of(qmp: &mut dyn Monitor) -> Result<Self, QmpError> {
        let name = qmp.run_if_known(&QueryName)?.and_then(|known| known.name).unwrap_or_default();
        // One question for cards of all kinds; `query-rx-filter` knows virtio's only.
        let network = qmp.run_if_known(&Human { command_line: "info network" })?;
        Ok(Self { name, macs: macs(&network.unwrap_or_default()) })
    }
}

impl QemuSource {
    /// Who the guest is. Two questions.
    ///
    /// # Errors
    /// When the monitor fails.
    pub fn identity(&mut self) -> Result<Identity, QemuError> {
        Ok(Identity::of(&mut *self.machine.qmp)?)
    }
}

/// The addresses in the answer to `info network`, each once.
fn macs(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for mac in text.lines().filter_map(mac_in) {
        let mac = mac.to_string();
        if !found.contains(&mac) {
            found.push(mac);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::monitor::stand_in::StandIn;

    /// Of QEMU 7.2 and 10.0: a card on a tap with two queues, one on a hub, one without anything
    /// behind it.
    const NETWORK: &str = "\
hub 0\r
 \\ hub0port1: user.0: index=0,type=user,net=10.0.2.0,restrict=off\r
 \\ hub0port0: e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56\r
net0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:01\r
 \\ host0: index=0,type=tap,ifname=tap0,script=no,downscript=/macaddr=52:54:00:00:00:09\r
net0: index=1,type=nic,\r
 \\ host0: index=1,type=tap,fd=9\r
rtl8139.0: index=0,type=nic,model=rtl8139,macaddr=52:54:00:00:00:02\r
odd: index=0,type=nic,model=odd,macaddr=52:54:00:00:00;x\r
";

    #[test]
    fn a_guest_is_known_by_its_name_and_the_addresses_of_its_cards() {
        let mut qmp = StandIn::new(&[
            ("query-name", json!({ "name": "web 01" })),
            ("info network", json!(NETWORK)),
        ]);
        let Identity { name, macs } = Identity::of(&mut qmp).unwrap();
        assert_eq!(name, "web 01");
        assert_eq!(macs, ["52:54:00:12:34:56", "52:54:00:00:00:01", "52:54:00:00:00:02"]);
    }

    #[test]
    fn one_without_a_name_and_cards_has_neither() {
        let mut qmp = StandIn::new(&[("query-name", json!({}))]);
        assert_eq!(Identity::of(&mut qmp).unwrap(), Identity::default());
    }
}
