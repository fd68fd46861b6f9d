//! Bodies in Kubernetes' protobuf form, which `kubectl create namespace|secret|configmap` sends for built-in kinds.
//!
//! Only reading, and only of the built-in kinds: answers are always JSON, which every client accepts. A body is an
//! envelope (`k8s\0`, then a message with type and raw object); the object is read by the field tables below, whose
//! numbers are those of the published `generated.proto` files. Unknown fields are skipped, as protobuf asks for.

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

/// First bytes of an envelope.
const MAGIC: &[u8] = b"k8s\0";
/// Deepest nesting of messages.
const DEPTH_MAX: usize = 16;

/// What a field holds.
#[derive(Clone, Copy)]
enum Shape {
    Text,
    /// Written as base64 in JSON.
    Bytes,
    Bool,
    Integer,
    /// A message of seconds and nanoseconds; written as a date.
    Time,
    /// A map with text keys.
    Map(&'static Shape),
    Message(Table),
    List(&'static Shape),
}

/// Fields of a message: number, name in JSON, content.
type Table = &'static [(u64, &'static str, Shape)];

use Shape::{Bool, Bytes, Integer, List, Map as MapOf, Message, Text, Time};

const TEXTS: Shape = MapOf(&Text);
const OWNER: Table = &[
    (1, "kind", Text),
    (3, "name", Text),
    (4, "uid", Text),
    (5, "apiVersion", Text),
    (6, "controller", Bool),
    (7, "blockOwnerDeletion", Bool),
];
const METADATA: Table = &[
    (1, "name", Text),
    (2, "generateName", Text),
    (3, "namespace", Text),
    (5, "uid", Text),
    (6, "resourceVersion", Text),
    (7, "generation", Integer),
    (8, "creationTimestamp", Time),
    (9, "deletionTimestamp", Time),
    (10, "deletionGracePeriodSeconds", Integer),
    (11, "labels", TEXTS),
    (12, "annotations", TEXTS),
    (13, "ownerReferences", List(&Message(OWNER))),
    (14, "finalizers", List(&Text)),
];
const NAMESPACE: Table = &[
    (1, "metadata", Message(METADATA)),
    (2, "spec", Message(&[(1, "finalizers", List(&Text))])),
    (3, "status", Message(&[(1, "phase", Text)])),
];
const CONFIG_MAP: Table =
    &[(1, "metadata", Message(METADATA)), (2, "data", TEXTS), (3, "binaryData", MapOf(&Bytes)), (4, "immutable", Bool)];
const SECRET: Table = &[
    (1, "metadata", Message(METADATA)),
    (2, "data", MapOf(&Bytes)),
    (3, "type", Text),
    (4, "stringData", TEXTS),
    (5, "immutable", Bool),
];
const LEASE_SPEC: Table = &[
    (1, "holderIdentity", Text),
    (2, "leaseDurationSeconds", Integer),
    (3, "acquireTime", Time),
    (4, "renewTime", Time),
    (5, "leaseTransitions", Integer),
    (6, "strategy", Text),
    (7, "preferredHolder", Text),
];
const LEASE: Table = &[(1, "metadata", Message(METADATA)), (2, "spec", Message(LEASE_SPEC))];
const DELETE_OPTIONS: Table = &[
    (1, "gracePeriodSeconds", Integer),
    (2, "preconditions", Message(&[(1, "uid", Text), (2, "resourceVersion", Text)])),
    (3, "orphanDependents", Bool),
    (4, "propagationPolicy", Text),
    (5, "dryRun", List(&Text)),
];
const ENVELOPE: Table = &[(1, "type", Message(&[(1, "apiVersion", Text), (2, "kind", Text)])), (2, "raw", Bytes)];

fn table_of(kind: &str) -> Option<Table> {
    Some(match kind {
        "Namespace" => NAMESPACE,
        "ConfigMap" => CONFIG_MAP,
        "Secret" => SECRET,
        "Lease" => LEASE,
        "DeleteOptions" => DELETE_OPTIONS,
        _ => return None,
    })
}

/// The JSON form of an enveloped object; `None` when it is broken or of a kind that is not read here.
pub fn decode(body: &[u8]) -> Option<Value> {
    let envelope = message(body.strip_prefix(MAGIC)?, ENVELOPE, 0)?;
    let raw = STANDARD.decode(envelope.get("raw")?.as_str()?).ok()?;
    let mut object = message(&raw, table_of(envelope["type"]["kind"].as_str()?)?, 0)?;
    object["apiVersion"] = envelope["type"]["apiVersion"].clone();
    object["kind"] = envelope["type"]["kind"].clone();
    Some(object)
}

/// A field as it is on the wire.
enum Wire<'a> {
    Number(u64),
    Slice(&'a [u8]),
}

fn message(mut bytes: &[u8], table: Table, depth: usize) -> Option<Value> {
    if depth > DEPTH_MAX {
        return None;
    }
    let mut fields = Map::new();
    while !bytes.is_empty() {
        let (number, wire) = next_field(&mut bytes)?;
        let Some((_, name, shape)) = table.iter().find(|(known, _, _)| *known == number) else { continue };
        add(&mut fields, name, *shape, &wire, depth)?;
    }
    Some(Value::Object(fields))
}

fn add(fields: &mut Map<String, Value>, name: &str, shape: Shape, wire: &Wire<'_>, depth: usize) -> Option<()> {
    match shape {
        List(entry) => {
            let entry = value(*entry, wire, depth)?;
            fields.entry(name).or_insert_with(|| json!([])).as_array_mut()?.push(entry);
        }
        MapOf(content) => {
            let (key, entry) = map_entry(*content, wire, depth)?;
            fields.entry(name).or_insert_with(|| json!({})).as_object_mut()?.insert(key, entry);
        }
        shape => {
            let value = value(shape, wire, depth)?;
            fields.insert(name.to_owned(), value);
        }
    }
    Some(())
}

fn value(shape: Shape, wire: &Wire<'_>, depth: usize) -> Option<Value> {
    Some(match (shape, wire) {
        (Text, Wire::Slice(bytes)) => json!(std::str::from_utf8(bytes).ok()?),
        (Bytes, Wire::Slice(bytes)) => json!(STANDARD.encode(bytes)),
        (Bool, Wire::Number(number)) => json!(*number != 0),
        // Negative numbers are sent as their two's complement.
        (Integer, Wire::Number(number)) => json!(number.cast_signed()),
        (Time, Wire::Slice(bytes)) => time(bytes, depth)?,
        (Message(table), Wire::Slice(bytes)) => message(bytes, table, depth + 1)?,
        _ => return None,
    })
}

fn time(bytes: &[u8], depth: usize) -> Option<Value> {
    let parts = message(bytes, &[(1, "seconds", Integer), (2, "nanos", Integer)], depth + 1)?;
    let number = |name: &str| parts.get(name).and_then(Value::as_i64);
    // An empty message is the zero time, which JSON writes as null.
    let Some(seconds) = number("seconds") else { return Some(Value::Null) };
    let nanos = i32::try_from(number("nanos").unwrap_or(0)).ok()?;
    Some(json!(Timestamp::new(seconds, nanos).ok()?.to_string()))
}

fn map_entry(content: Shape, wire: &Wire<'_>, depth: usize) -> Option<(String, Value)> {
    let &Wire::Slice(mut bytes) = wire else { return None };
    let (mut key, mut entry) = (String::new(), json!(""));
    while !bytes.is_empty() {
        match next_field(&mut bytes)? {
            (1, Wire::Slice(text)) => key = std::str::from_utf8(text).ok()?.to_owned(),
            (2, wire) => entry = value(content, &wire, depth + 1)?,
            _ => {}
        }
    }
    Some((key, entry))
}

fn next_field<'a>(bytes: &mut &'a [u8]) -> Option<(u64, Wire<'a>)> {
    let tag = varint(bytes)?;
    let wire = match tag & 7 {
        0 => Wire::Number(varint(bytes)?),
        1 => Wire::Slice(take(bytes, 8)?),
        2 => {
            let length = usize::try_from(varint(bytes)?).ok()?;
            Wire::Slice(take(bytes, length)?)
        }
        5 => Wire::Slice(take(bytes, 4)?),
        _ => return None,
    };
    Some((tag >> 3, wire))
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(taken)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, u8::try_from(content.len()).unwrap()], content].concat()
    }

    #[test]
    fn a_secret_is_read() {
        let label = [field(1, b"k"), field(2, b"v")].concat();
        let created = field(8, &[8, 60]);
        let metadata = [field(1, b"s"), field(3, b"default"), field(11, &label), created].concat();
        let data = [field(1, b"key"), field(2, b"hi")].concat();
        let raw = [field(1, &metadata), field(2, &data), field(3, b"Opaque"), vec![5 << 3, 1], field(15, b"unknown")]
            .concat();
        let envelope = [field(1, &[field(1, b"v1"), field(2, b"Secret")].concat()), field(2, &raw)].concat();
        let object = decode(&[MAGIC, &envelope].concat()).unwrap();
        assert_eq!(
            object,
            json!({
                "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": true, "data": {"key": "aGk="},
                "metadata": {
                    "name": "s", "namespace": "default", "labels": {"k": "v"},
                    "creationTimestamp": "1970-01-01T00:01:00Z",
                },
            })
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn nothing_that_comes_in_is_more_than_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = decode(&[MAGIC, &bytes].concat());
            let _ = message(&bytes, SECRET, 0);
        }
    }
}
