import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;

/** Prints the models, an answer and a stream, with the JDK's client as it comes. Arguments: server URL, body. */
public class Ask {
    public static void main(String[] given) throws IOException, InterruptedException {
        String body = given[1];
        System.out.println(answer(HttpRequest.newBuilder(URI.create(given[0] + "/v1/models"))));
        for (String asked : new String[] {body, body.substring(0, body.length() - 1) + ", \"stream\": true}"}) {
            HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(given[0] + "/v1/chat/completions"));
            System.out.println("--");
            System.out.println(
                answer(request.header("Content-Type", "application/json").POST(BodyPublishers.ofString(asked))));
        }
    }

    /** A new client per request, for it offers an upgrade on a connection's first only. */
    private static String answer(HttpRequest.Builder request) throws IOException, InterruptedException {
        HttpResponse<String> response = HttpClient.newHttpClient().send(request.build(), BodyHandlers.ofString());
        if (response.statusCode() != 200) {
            throw new IOException(response.statusCode() + ": " + response.body());
        }
        return response.body();
    }
}
