//! The settings of a migration on the command line: the options that are settings, `--set`, the
//! list in help texts and the words that shells complete.
//!
//! All of it is made from the engine's table, so that a new setting is written down once.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use godwit_engine::Cancel;
use godwit_engine::handle::{HandleError, MigrationHandle, all_settings};
use godwit_policy::{About, SettingError};
use godwit_units::GRAMMAR;

use crate::layout;

/// Help is as wide as this.
const WIDTH: usize = 80;

/// The settings that were given, by name: those with options of their own first.
#[derive(Debug, Default)]
pub(crate) struct Given(pub(crate) Vec<(String, String)>);

impl clap::Args for Given {
    fn augment_args(command: Command) -> Command {
        let options = all_settings().filter(|about| about.option).map(|about| {
            Arg::new(about.name)
                .long(about.name)
                .value_name(about.placeholder())
                .value_parser(Checked(about))
                .hide_possible_values(true)
                .help(sentence(about))
        });
        let set = Arg::new("set")
            .long("set")
            .value_name("KEY=VALUE")
            .action(ArgAction::Append)
            .value_parser(Assignment)
            .hide_possible_values(true)
            .help(
                "Any other setting; `godwit set --help` lists them all. More than once for several",
            );
        command.args(options).arg(set)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let option = |about: &About| {
            let value = matches.get_one::<String>(about.name)?;
            Some((about.name.to_owned(), value.clone()))
        };
        let options = all_settings().filter(|about| about.option).filter_map(option);
        let others = matches.get_many::<(String, String)>("set").into_iter().flatten().cloned();
        Ok(Self(options.chain(others).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Checks an option that is a setting.
#[derive(Clone)]
struct Checked(&'static About);

impl TypedValueParser for Checked {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        let name = self.0.name;
        let check = move |value: &str| {
            let typed = vec![(name.to_owned(), value.to_owned())];
            match MigrationHandle::typed(typed, Cancel::default()) {
                Ok(_) => Ok(value.to_owned()),
                // The option and the value are named already.
                Err(HandleError::Setting(SettingError::Value { allowed, .. })) => Err(allowed),
                Err(error) => Err(error.to_string()),
            }
        };
        check.parse_ref(command, argument, value)
    }

    /// The words, for shells.
    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let words = self.0.words.iter().map(|(word, _)| PossibleValue::new(*word));
        if self.0.words.is_empty() { None } else { Some(Box::new(words)) }
    }
}

/// A `key=value`, of which shells complete the key.
#[derive(Clone)]
pub(crate) struct Assignment;

impl TypedValueParser for Assignment {
    type Value = (String, String);

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<(String, String), clap::Error> {
        let split = |text: &str| match text.split_once('=') {
            Some((key, value)) => Ok((key.trim().to_owned(), value.trim().to_owned())),
            None => Err("write it as key=value, such as downtime-limit=300ms"),
        };
        split.parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(all_settings().map(|about| PossibleValue::new(about.name))))
    }
}

/// What a setting does, with its values, as the help of an option.
fn sentence(about: &About) -> String {
    let mut letters = about.meaning.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    let meaning: String = first.chain(letters).collect();
    format!("{meaning} [{}; default: {}]", about.values(), about.default)
}

/// All settings, and how units are written: what stands below the help of `godwit set`.
pub(crate) fn help() -> String {
    format!("Settings:\n{}\n{GRAMMAR}", list(all_settings(), WIDTH))
}

/// Settings, with their values and what they do.
pub(crate) fn list(settings: impl Iterator<Item = &'static About>, width: usize) -> String {
    let line = |about: &About| {
        let text = format!("{} [{}; default: {}]", about.meaning, about.values(), about.default);
        layout::wrap(&format!("  {:<20} ", about.name), &text, 23, width) + "\n"
    };
    settings.map(line).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Arguments;

    #[test]
    fn every_setting_with_an_option_has_one_and_all_stand_in_the_help() {
        let command = Arguments::command();
        let migrate = command.find_subcommand("migrate").unwrap();
        for about in all_settings() {
            let option = migrate.get_arguments().find(|found| found.get_long() == Some(about.name));
            assert_eq!(option.is_some(), about.option, "{}", about.name);
            let line = format!("  {:<20} {}", about.name, &about.meaning[..20]);
            assert!(help().contains(&line), "{line}");
        }
    }

    #[test]
    fn options_come_first_and_values_are_checked() {
        let matches = |line: &str| {
            let command = <Given as clap::Args>::augment_args(Command::new("x"));
            let matches =
                command.try_get_matches_from(line.split(' ')).map_err(|error| error.to_string());
            matches.map(|matches| Given::from_arg_matches(&matches).unwrap().0)
        };
        let given = matches("x --set max-delay=7 --throttle off --patience 5s").unwrap();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(
            given,
            [pair("patience", "5s"), pair("throttle", "off"), pair("max-delay", "7")]
        );
        let refused = matches("x --throttle hard").unwrap_err();
        assert!(refused.contains("'--throttle <MODE>': use off, direct, staged"), "{refused}");
        let refused = matches("x --compression lz5").unwrap_err();
        assert!(refused.contains("use auto, none, lz4"), "{refused}");
        assert!(matches("x --set max-delay").unwrap_err().contains("write it as key=value"));
    }
}
