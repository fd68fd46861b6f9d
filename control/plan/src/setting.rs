//! Setting: the objects of all settings that exist are made with their defaults; a value that does not parse is
//! reported and not applied.

use addax_api::setting::{self, SETTINGS};
use addax_api::{NAMESPACE, Setting, SettingSpec};
use jiff::Timestamp;

use crate::action::{Action, Object};
use crate::observed::Observed;
use crate::write;

/// What is to be done for a setting now.
pub fn plan(observed: &Observed, name: &str, _now: Timestamp) -> Vec<Action> {
    let Some(old) = observed.settings.get(name) else {
        return create(name);
    };
    let mut new = old.clone();
    let verdict = setting::validate(name, &new.spec.value);
    let status = new.status.get_or_insert_default();
    status.applied = verdict.is_ok();
    status.message = verdict.err().map(|error| error.to_string()).unwrap_or_default();
    write::patches(old, &new)
}

fn create(name: &str) -> Vec<Action> {
    let Some(info) = SETTINGS.iter().find(|info| info.name == name) else {
        return Vec::new();
    };
    let spec = SettingSpec { value: info.default.to_owned() };
    let mut object = Setting::new(name, spec);
    object.metadata.namespace = Some(NAMESPACE.to_owned());
    vec![Action::Create(Box::new(Object::Setting(object)))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{at, observed, setting};

    #[test]
    fn defaults_are_made_and_bad_values_reported() {
        let seen = observed();
        assert!(matches!(&plan(&seen, "default-replica-count", at(0))[..], [Action::Create(_)]));
        assert_eq!(plan(&seen, "no-such-setting", at(0)), []);
        let seen = seen.with(setting("default-replica-count", "many"));
        let actions = plan(&seen, "default-replica-count", at(0));
        let [Action::PatchStatus { patch, .. }] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!(patch["status"]["applied"], false);
        assert!(patch["status"]["message"].as_str().unwrap().contains("from 1 to 20"));
        let seen = seen.apply(&actions);
        assert_eq!(plan(&seen, "default-replica-count", at(0)), []);
    }
}
