//! What an operator types.

use godwit_disk::DiskChoice;
use godwit_engine::address::Address;
use godwit_engine::handle::MigrationHandle;
use godwit_policy::Settings;
use godwit_qemu::Mapping;
use godwit_units::{ByteCount, Rate, TypedRate, format_duration, parse_duration};

/// A line, which may be any of these. What is understood is shown so that it is understood again.
pub(crate) fn words(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    for line in text.lines() {
        if let Ok(size) = line.parse::<ByteCount>() {
            let _ = size.to_string();
        }
        if let Ok(rate) = line.parse::<Rate>() {
            let _ = (rate.to_string(), rate.in_bits(), rate.time_for(ByteCount(u64::MAX)));
        }
        if let Ok(rate) = line.parse::<TypedRate>() {
            let _ = (rate.rate(), rate.both());
        }
        if let Ok(time) = parse_duration(line) {
            let _ = format_duration(time);
        }
        if let Ok(address) = line.parse::<Address>() {
            let shown = address.to_string();
            assert_eq!(shown.parse::<Address>().map(|it| it.to_string()), Ok(shown.clone()));
        }
        if let Ok(choice) = line.parse::<DiskChoice>() {
            let shown = choice.to_string();
            assert_eq!(shown.parse::<DiskChoice>(), Ok(choice));
        }
        let _ = line.parse::<Mapping>();
        let mut settings = Settings::default();
        if settings.assign(line).is_ok() {
            let _ = settings.limit_after(u32::MAX);
        }
        if let Some((key, value)) = line.split_once('=') {
            let typed = vec![(key.to_owned(), value.to_owned())];
            let handle = MigrationHandle::default();
            if handle.set(&typed).is_ok() {
                // What `godwit status` shows can be set again.
                let shown: Vec<(String, String)> = handle
                    .settings()
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), value))
                    .collect();
                let _ = (handle.limit(), handle.policy(), handle.compression(), shown);
            }
        }
    }
}
