//! `addax volume force-open|recover|purge-discarded`: what an operator does to a volume's record by hand.
//!
//! *What it is.* Each puts a request into `spec.recovery` of the Volume and waits for its account in `status.recoveries`.
//! What loses data is confirmed by typing the volume's name; a script gives it as the value of an option whose name says
//! what is lost. There is no option that says yes to whatever volume it is.
//!
//! *When things fail.* A refusal is the program's error, with the reason that stands in the account. A request that was not
//! answered in time is taken back, and is not carried out later either: it carries the time until which it is meant.

use std::io::Write;
use std::time::Duration;

use addax_api::recovery::{RecoveryAccount, RecoveryAction, RecoveryOutcome, RecoveryRequest, find};
use addax_api::{Time, Volume, name};
use anyhow::{Context, Result, bail, ensure};
use jiff::{SignedDuration, Timestamp};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::{api, api_error, progress};
use crate::output::{self, Format};

/// Pause between two looks at the volume.
const LOOK: Duration = Duration::from_millis(100);

/// What is asked for, without the confirmation.
#[derive(Debug, Clone)]
pub struct Ask {
    /// The volume.
    pub volume: String,
    /// What.
    pub action: RecoveryAction,
    /// The copy that it is about.
    pub replica: String,
    /// Copies that are done without.
    pub lost: Vec<String>,
    /// How long to wait.
    pub limit: Duration,
}

/// Asks, waits for the answer and prints it. `given` is the name that a script gave in place of typing it.
pub async fn run(client: &Client, ask: Ask, given: Option<String>, format: Format, quiet: bool) -> Result<()> {
    name::validate_volume_name(&ask.volume)?;
    let volumes = api::<Volume>(client);
    let found = volumes.get_opt(&ask.volume).await.map_err(api_error)?;
    let found = found.with_context(|| format!("volume {:?} does not exist", ask.volume))?;
    if let Some(warning) = warning(&ask, &found) {
        confirm(&ask.volume, &warning, given)?;
    }
    let bar = progress(quiet, format!("{}: {} is being carried out", ask.volume, ask.action.as_str()));
    let account = request(&volumes, &ask).await?;
    bar.finish_and_clear();
    if account.outcome == RecoveryOutcome::Refused {
        bail!("{}: refused: {}", ask.volume, account.message);
    }
    match format {
        Format::Table => {
            println!("{}", account.message);
            Ok(())
        }
        _ => output::print(format, &[], &[account], |_| Vec::new()),
    }
}

/// What is lost by it, if anything is.
fn warning(ask: &Ask, volume: &Volume) -> Option<String> {
    let status = volume.status.clone().unwrap_or_default();
    let config = status.config.as_ref();
    match ask.action {
        RecoveryAction::ForceOpen => {
            let in_sync = config.map(|config| config.in_sync.join(", ")).unwrap_or_default();
            let kind = match config.is_some_and(|config| config.is_in_sync(&ask.replica)) {
                true => "It has every acknowledged write".to_owned(),
                false => {
                    format!("Every acknowledged write that it missed is lost; those have been written to {in_sync}")
                }
            };
            Some(format!(
                "The copy {} becomes the only one of volume {}. {kind}. The other copies are set aside and kept.",
                ask.replica, ask.volume
            ))
        }
        RecoveryAction::Recover if ask.lost.is_empty() => None,
        RecoveryAction::Recover => Some(format!(
            "The record of volume {} is rebuilt without asking {}. Acknowledged writes that only they have are lost.",
            ask.volume,
            ask.lost.join(", ")
        )),
        RecoveryAction::Purge => Some(format!(
            "The copy {} of volume {} is removed with its data, which may be the only one that has some writes.",
            ask.replica, ask.volume
        )),
    }
}

/// Has a person type the volume's name, or takes the one given.
fn confirm(volume: &str, warning: &str, given: Option<String>) -> Result<()> {
    let typed = match given {
        Some(given) => given,
        None => {
            // Not where the result goes, which a program may be reading.
            eprintln!("{warning}");
            eprint!("Type the volume's name to go on: ");
            std::io::stderr().flush()?;
            let mut line = String::new();
            std::io::stdin().read_line(&mut line)?;
            line.trim().to_owned()
        }
    };
    ensure!(typed == volume, "{typed:?} is not {volume:?}, the name of the volume: nothing was done");
    Ok(())
}

/// Who asks, as far as this machine knows.
fn asker() -> String {
    let user = nix::unistd::User::from_uid(nix::unistd::getuid()).ok().flatten().map(|user| user.name);
    let user = user.unwrap_or_else(|| format!("uid {}", nix::unistd::getuid()));
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let mut text = format!("{user}@{}", host.trim());
    text.truncate(text.floor_char_boundary(256));
    text
}

async fn request(volumes: &Api<Volume>, ask: &Ask) -> Result<RecoveryAccount> {
    let limit = SignedDuration::try_from(ask.limit).unwrap_or(SignedDuration::MAX);
    let id = format!("{}-{}", ask.action.as_str(), Timestamp::now().as_nanosecond());
    let request = RecoveryRequest {
        id: id.clone(),
        action: ask.action,
        replica: ask.replica.clone(),
        lost: ask.lost.clone(),
        confirm: ask.volume.clone(),
        requested_by: asker(),
        not_after: Time(Timestamp::now().checked_add(limit).unwrap_or(Timestamp::MAX)),
    };
    put(volumes, &ask.volume, &json!(request)).await?;
    let until = tokio::time::Instant::now() + ask.limit;
    let answer = loop {
        let found = volumes.get_opt(&ask.volume).await.map_err(api_error)?;
        let found = found.with_context(|| format!("volume {:?} does not exist any more", ask.volume))?;
        let status = found.status.unwrap_or_default();
        if let Some(account) = find(&status.recoveries, &id) {
            break Some(account.clone());
        }
        let asked = found.spec.recovery.is_some_and(|request| request.id == id);
        ensure!(asked, "{}: another request has taken the place of this one", ask.volume);
        if tokio::time::Instant::now() > until {
            break None;
        }
        tokio::time::sleep(LOOK).await;
    };
    // Answered or not: it is nobody's wish any more.
    let taken_back = put(volumes, &ask.volume, &Value::Null).await;
    let answer = answer.with_context(|| {
        format!("{}: not answered within {} s; the request was taken back", ask.volume, ask.limit.as_secs())
    })?;
    taken_back?;
    Ok(answer)
}

async fn put(volumes: &Api<Volume>, volume: &str, request: &Value) -> Result<()> {
    let patch = Patch::Merge(json!({ "spec": { "recovery": request } }));
    volumes.patch(volume, &PatchParams::default(), &patch).await.map_err(api_error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use addax_api::{VolumeConfig, VolumeSpec};

    fn ask(action: RecoveryAction, lost: &[&str]) -> Ask {
        Ask {
            volume: "v".to_owned(),
            action,
            replica: "c".to_owned(),
            lost: lost.iter().map(|name| (*name).to_owned()).collect(),
            limit: Duration::from_secs(1),
        }
    }

    #[test]
    fn what_loses_data_says_what_and_the_rest_asks_nothing() {
        let mut volume = Volume::new("v", VolumeSpec::with_size(1 << 20));
        let config = VolumeConfig { in_sync: vec!["a".to_owned(), "b".to_owned()], ..VolumeConfig::default() };
        volume.status.get_or_insert_default().config = Some(config);
        let forced = warning(&ask(RecoveryAction::ForceOpen, &[]), &volume).unwrap();
        assert!(forced.contains("The copy c") && forced.contains("written to a, b"), "{forced}");
        let member = Ask { replica: "a".to_owned(), ..ask(RecoveryAction::ForceOpen, &[]) };
        assert!(warning(&member, &volume).unwrap().contains("every acknowledged write"));
        assert_eq!(warning(&ask(RecoveryAction::Recover, &[]), &volume), None);
        assert!(warning(&ask(RecoveryAction::Recover, &["a"]), &volume).unwrap().contains("without asking a"));
        assert!(warning(&ask(RecoveryAction::Purge, &[]), &volume).unwrap().contains("removed with its data"));
    }

    #[test]
    fn only_the_volumes_own_name_confirms() {
        confirm("v", "", Some("v".to_owned())).unwrap();
        for wrong in ["yes", "", "w"] {
            let error = confirm("v", "", Some(wrong.to_owned())).unwrap_err().to_string();
            assert!(error.contains("nothing was done"), "{error}");
        }
    }
}
