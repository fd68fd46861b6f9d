//! Saved configuration: what `save_config` reads, and the replay of a file given by `-c`.
//!
//! *Flow of a replay.* The file is walked twice: once for the methods of the start-up phase (and those of both), then,
//! after the framework has started, for the run-time ones. A method of both phases runs only in the first walk. An entry
//! that is an array is a batch. *When things fail.* The first refused entry ends the replay with an error that names it.

use std::path::Path;
use std::rc::Rc;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Methods, RpcError, RpcResult, When, params, server};
use crate::app::{App, Phase};

/// Subsystems in SPDK's order, with what each needs.
const SUBSYSTEMS: &[(&str, &[&str])] = &[
    ("scheduler", &[]),
    ("sock", &[]),
    ("iobuf", &[]),
    ("keyring", &[]),
    ("accel", &["iobuf"]),
    ("bdev", &["accel", "keyring", "sock", "iobuf"]),
    ("nvmf", &["bdev", "keyring", "sock", "iobuf"]),
];

/// Adds this module's methods; `methods` is filled in after all modules have registered.
pub fn register(m: &mut Methods, methods: Rc<std::cell::OnceCell<Rc<Methods>>>) {
    m.add("framework_get_subsystems", When::Runtime, |_, params| async move {
        params::none(params.as_ref(), "'framework_get_subsystems'")?;
        let list = SUBSYSTEMS.iter().map(|(name, needs)| json!({ "subsystem": name, "depends_on": needs }));
        Ok(Value::Array(list.collect()))
    });
    m.add("framework_get_config", When::Runtime, move |app, params| {
        let methods = methods.get().cloned();
        async move { get_config(&app, methods.as_deref(), params) }
    });
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetConfig {
    name: String,
    #[serde(default)]
    with_batches: bool,
}

fn get_config(app: &App, methods: Option<&Methods>, params: Option<Value>) -> RpcResult {
    let request: GetConfig = params::decode(params, || RpcError::invalid_params("Invalid arguments"))?;
    let _ = request.with_batches;
    if !SUBSYSTEMS.iter().any(|(name, _)| *name == request.name) {
        return Err(RpcError::invalid_params(format!("Subsystem '{}' not found", request.name)));
    }
    let mut entries = Vec::new();
    for (_, save) in methods.iter().flat_map(|m| &m.save).filter(|(name, _)| *name == request.name) {
        for (method, params) in save(app) {
            entries.push(if params.is_null() {
                json!({ "method": method })
            } else {
                json!({ "method": method, "params": params })
            });
        }
    }
    Ok(Value::Array(entries))
}

#[derive(Deserialize)]
struct ConfigFile {
    subsystems: Vec<Subsystem>,
}

#[derive(Deserialize)]
struct Subsystem {
    subsystem: String,
    config: Option<Vec<Value>>,
}

#[derive(Deserialize, Clone)]
struct Entry {
    method: String,
    params: Option<Value>,
}

/// A configuration file, read and checked for its form.
#[derive(Debug, Clone)]
pub struct Config {
    entries: Vec<(String, String, Option<Value>)>,
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// A sentence that names the file and what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("config file {}: {e}", path.display()))?;
        Self::parse(&text).map_err(|e| format!("config file {}: {e}", path.display()))
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: ConfigFile = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let mut entries = Vec::new();
        for subsystem in file.subsystems {
            for (index, value) in subsystem.config.unwrap_or_default().into_iter().enumerate() {
                let batch = if let Value::Array(batch) = value { batch } else { vec![value] };
                for one in batch {
                    let entry: Entry = serde_json::from_value(one)
                        .map_err(|e| format!("subsystem {:?}, entry {index}: {e}", subsystem.subsystem))?;
                    entries.push((subsystem.subsystem.clone(), entry.method, entry.params));
                }
            }
        }
        Ok(Self { entries })
    }

    /// Plays the entries of the present phase.
    ///
    /// # Errors
    /// A sentence that names the entry and the refusal.
    pub async fn replay(&self, app: &App, methods: &Rc<Methods>) -> Result<(), String> {
        let phase = app.phase();
        for (subsystem, name, params) in &self.entries {
            let Some(method) = methods.table.get(name.as_str()) else {
                return Err(format!("subsystem {subsystem:?}: there is no method {name:?}"));
            };
            let here = match method.when {
                When::Startup | When::Always => phase == Phase::Startup,
                When::Runtime => phase == Phase::Runtime,
            };
            if here {
                let params = params.clone().filter(|p| !p.is_null());
                server::call(app, methods, name, params)
                    .await
                    .map_err(|e| format!("subsystem {subsystem:?}, method {name:?}: {} ({})", e.message, e.code))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_file_is_refused_with_its_place() {
        let bad = Config::parse(r#"{"subsystems":[{"subsystem":"bdev","config":[{"params":{}}]}]}"#).unwrap_err();
        assert!(bad.contains("bdev") && bad.contains("entry 0") && bad.contains("method"), "{bad}");
        assert!(Config::parse("{").unwrap_err().contains("EOF"));
        assert!(Config::parse(r#"{"other":1}"#).unwrap_err().contains("subsystems"));
    }

    #[test]
    fn unknown_members_at_the_root_and_batches_are_taken() {
        let text = r#"{"x":1,"subsystems":[{"subsystem":"bdev","config":[[{"method":"a"},{"method":"b"}]]},
            {"subsystem":"scsi","config":null}]}"#;
        assert_eq!(Config::parse(text).unwrap().entries.len(), 2);
    }
}
