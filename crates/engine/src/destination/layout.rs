//! Does the offered VM fit the one that waits here?

use godwit_disk::Disk;
use godwit_memory::RamBlock;
use godwit_wire::{CHANNELS_LIMIT, Offer};

/// Maps the source's numbers of the RAM blocks to ours.
///
/// # Errors
/// What does not fit, with both values and the cure, in one line.
pub(super) fn fit(offer: &Offer, machine: &str, blocks: &[RamBlock]) -> Result<Vec<usize>, String> {
    if offer.machine != machine {
        return Err(format!(
            "the source is a {} machine and the destination a {machine}: both sides must be the \
             same kind",
            offer.machine
        ));
    }
    if !(1..=CHANNELS_LIMIT).contains(&offer.channels) {
        return Err(format!(
            "{} channels were asked for: use 1 to {CHANNELS_LIMIT}",
            offer.channels
        ));
    }
    let mut order = Vec::new();
    for theirs in &offer.blocks {
        let found = blocks.iter().position(|block| block.name() == theirs.name);
        let Some(own) = found else {
            return Err(format!(
                "RAM block '{}' of the source does not exist at the destination: start the \
                 destination's VM with the same memory backends (it has {})",
                theirs.name,
                names(blocks.iter().map(RamBlock::name)),
            ));
        };
        if order.contains(&own) {
            return Err(format!("RAM block '{}' was offered twice", theirs.name));
        }
        if blocks[own].pages() != theirs.pages {
            return Err(format!(
                "RAM block '{}' has {} at the source and {} at the destination: start the \
                 destination's VM with the same memory size",
                theirs.name,
                // A hostile size must not overflow.
                godwit_units::ByteCount(theirs.pages.0.saturating_mul(godwit_units::PAGE_SIZE)),
                blocks[own].pages().bytes(),
            ));
        }
        order.push(own);
    }
    if order.len() != blocks.len() {
        let extra =
            blocks.iter().enumerate().filter(|(i, _)| !order.contains(i)).map(|(_, b)| b.name());
        return Err(format!(
            "the destination has RAM blocks that the source has not ({}): start its VM with the \
             same memory backends",
            names(extra)
        ));
    }
    Ok(order)
}

/// The disks that the source wants to send.
///
/// # Errors
/// What cannot be, in one line.
pub(super) fn disks(offer: &Offer) -> Result<Vec<Disk>, String> {
    let mut disks: Vec<Disk> = Vec::new();
    for theirs in &offer.disks {
        if disks.iter().any(|disk| disk.name == theirs.name) {
            return Err(format!("disk '{}' was offered twice", theirs.name));
        }
        if theirs.size.0 == 0 || i64::try_from(theirs.size.0).is_err() {
            return Err(format!("disk '{}' was offered with {} bytes", theirs.name, theirs.size.0));
        }
        disks.push(Disk { name: theirs.name.clone(), size: theirs.size });
    }
    Ok(disks)
}

fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let list: Vec<String> = names.map(|name| format!("'{name}'")).collect();
    if list.is_empty() { "none".to_owned() } else { list.join(", ") }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_units::PageCount;
    use godwit_wire::{BlockOffer, Features};

    use super::*;

    #[test]
    fn blocks_are_matched_by_name_and_those_that_do_not_fit_are_named() {
        let block = |name: &str, pages| RamBlock::anonymous(name, PageCount(pages)).unwrap();
        let blocks = [block("a", 4), block("b", 8)];
        let offer = |offered: &[(&str, u64)]| Offer {
            channels: 2,
            codecs: 0,
            features: Features::NONE,
            verify: false,
            running: true,
            machine: "test".to_owned(),
            blocks: offered
                .iter()
                .map(|(name, pages)| BlockOffer {
                    name: (*name).to_owned(),
                    pages: PageCount(*pages),
                })
                .collect(),
            disks: Vec::new(),
        };
        let fit = |offered: &[(&str, u64)]| fit(&offer(offered), "test", &blocks);
        assert_eq!(fit(&[("b", 8), ("a", 4)]), Ok(vec![1, 0]));
        assert!(fit(&[("a", 4)]).unwrap_err().contains("has not ('b')"));
        assert!(fit(&[("a", 4), ("c", 8)]).unwrap_err().contains("(it has 'a', 'b')"));
        assert!(fit(&[("a", 4), ("b", 4)]).unwrap_err().contains("16KiB at the source and 32KiB"));
    }
}
