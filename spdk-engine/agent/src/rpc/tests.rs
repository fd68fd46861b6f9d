#![allow(clippy::unwrap_used)]
use super::*;

async fn serve(stream: UnixStream, order: fn(Vec<Value>) -> Vec<Value>, batch: usize) {
    let (mut read, mut write) = stream.into_split();
    let mut framer = Framer::new();
    let mut waiting = Vec::new();
    let mut chunk = [0_u8; 512];
    loop {
        let count = read.read(&mut chunk).await.unwrap_or(0);
        if count == 0 {
            return;
        }
        framer.push(&chunk[..count]);
        while let Some(request) = framer.next_value().unwrap() {
            waiting.push(request);
        }
        if waiting.len() >= batch {
            for answer in order(std::mem::take(&mut waiting)) {
                write.write_all(answer.to_string().as_bytes()).await.unwrap();
            }
        }
    }
}

fn echo(request: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": request["id"], "result": request["params"]})
}

#[tokio::test]
async fn answers_out_of_order_reach_their_callers() {
    let (near, far) = UnixStream::pair().unwrap();
    tokio::spawn(serve(far, |requests| requests.iter().rev().map(echo).collect(), 5));
    let client = Client::over(near);
    let calls = (0..5).map(|n| client.call("echo", json!({"n": n}), CALL_DEADLINE));
    let results = futures::future::join_all(calls).await;
    for (n, result) in results.into_iter().enumerate() {
        assert_eq!(result.unwrap(), json!({"n": n}));
    }
    assert!(lock(&client.waiters).is_empty());
}

#[tokio::test]
async fn errors_keep_code_and_words() {
    let (near, far) = UnixStream::pair().unwrap();
    let refuse = |requests: Vec<Value>| {
        requests
            .iter()
            .map(|r| json!({"jsonrpc": "2.0", "id": r["id"], "error": {"code": -19, "message": "No such device"}}))
            .collect()
    };
    tokio::spawn(serve(far, refuse, 1));
    let error = Client::over(near).call("bdev_get_bdevs", Value::Null, CALL_DEADLINE).await.unwrap_err();
    assert_eq!(error.code(), Some(-19));
    assert!(error.is_not_found());
    assert_eq!(error.to_string(), "bdev_get_bdevs: No such device (code -19)");
}

#[tokio::test(start_paused = true)]
async fn a_silent_data_plane_is_a_timeout_and_leaves_nothing_behind() {
    let (near, _far) = UnixStream::pair().unwrap();
    let client = Client::over(near);
    let error = client.call("spdk_get_version", Value::Null, CALL_DEADLINE).await.unwrap_err();
    assert!(matches!(error, RpcError::Timeout { .. }));
    assert!(lock(&client.waiters).is_empty());
}

#[tokio::test]
async fn a_lost_connection_ends_calls_in_flight_and_later_ones() {
    let (near, far) = UnixStream::pair().unwrap();
    let client = Client::over(near);
    let call = client.call("slow", Value::Null, CALL_DEADLINE);
    let (result, ()) = tokio::join!(call, async move { drop(far) });
    assert!(matches!(result, Err(RpcError::Disconnected { .. })));
    client.closed().await;
    let later = client.call("later", Value::Null, CALL_DEADLINE).await;
    assert!(matches!(later, Err(RpcError::Disconnected { .. })));
}

#[tokio::test]
async fn null_params_are_left_out() {
    let sent: Value = serde_json::from_slice(&request(3, "m", Value::Null)).unwrap();
    assert!(sent.get("params").is_none());
    assert_eq!(sent["id"], 3);
}
